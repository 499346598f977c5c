// What the launches of one call are given besides their tensors: the stream, and memory on the device for lists too
// long for a launch's parameters. The implementation (tables.cpp) knows torch's allocators; kernel files do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device.h"

namespace lightning_apex {

// How every entry of a table begins, however many addresses follow.
struct EntryHead {
  int64_t numel;
  int32_t position;     // in the caller's list
  int32_t first_chunk;  // ascending in a table, from 0
};

// How many blocks a tensor takes; `once_a_tensor`: at least one.
__host__ __device__ inline int64_t chunks_of(int64_t numel, int chunk_size, bool once_a_tensor) {
  return numel == 0 && once_a_tensor ? 1 : (numel + chunk_size - 1) / chunk_size;
}

// A list as the host has it.
struct HostTable {
  const void* entries;
  size_t entry_bytes;
  int32_t count, chunks;
};
// The same on the device.
struct DeviceTable {
  const void* entries;
  const int32_t* tensor_of_chunk;
  uint32_t* arrivals;  // one a tensor, 0 whenever no kernel of this stream is at work
};

// A table on the device is found again by what is in it, all addresses included: whoever frees, moves or adds a tensor
// gets another. The most recently used are kept.
class Tables {
 public:
  Tables(int device, Stream stream);
  ~Tables();
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  Stream stream() const { return stream_; }
  // Whether the launches go into a graph: then nothing that they are given may be shared with other calls.
  bool captured() const { return captured_; }
  // A copy of `table` on the device, made on the stream if none is there.
  DeviceTable find(const HostTable& table);
  // n zeros, for kernels that leave zeros behind.
  uint32_t* zeros(int n);

 private:
  struct Held;
  int device_;
  Stream stream_;
  bool captured_;
  std::unique_ptr<Held> held_;
};

}  // namespace lightning_apex
