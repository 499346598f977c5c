// The shared memory of one block: fresh for each, poisoned, and guarded on both sides.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "machine.h"

namespace simt {

class SharedMemory {
 public:
  void begin_launch();
  // nullptr is the key of the dynamic array.
  void* find(const void* key) const;
  bool fits(size_t bytes) const;  // in what is left for static arrays
  // nullptr: there is no room for the blocks of so large a launch.
  void* allocate(const void* key, size_t bytes, Where where);
  // Ends the block. Says which array was written outside, or "".
  std::string release();

 private:
  struct Array {
    const void* key;
    unsigned char* memory;  // guard, array, guard
    size_t bytes;
    Where where;
  };
  unsigned char* arena_ = nullptr;
  size_t used_ = 0;
  std::vector<Array> arrays_;
  size_t static_bytes_ = 0;
};

}  // namespace simt
