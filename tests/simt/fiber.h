// Fibers: stacks that take turns on one OS thread.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

class Fiber {
 public:
  explicit Fiber(void (*entry)());  // `entry` never returns: a fiber is reused, not ended
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  void resume();       // runs it until it parks
  static void park();  // called on a fiber: back to who resumed it

 private:
  static void begin();
  void enter();
  static void leave();
  void (*entry_)();
#if !defined(__x86_64__)
  ucontext_t context_;
#endif
  void* stack_pointer_ = nullptr;
  void* mapping_ = nullptr;
  void* thread_ = nullptr;  // to ThreadSanitizer every fiber is a thread
};

}  // namespace simt
