#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>

#include "sanitizers.h"

namespace simt {
namespace {

constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 4096;

Fiber* running = nullptr;
// Of whoever called resume(), which need not be the same each time.
#if defined(SIMT_ADDRESS)
const void* resumer_stack = nullptr;
size_t resumer_stack_bytes = 0;
#elif defined(SIMT_THREAD)
void* resumer_thread = nullptr;
#endif

#if defined(__x86_64__)
void* resumer = nullptr;  // the stack pointer

// Saves what a called function must preserve, and goes on where `to` was saved. The compiler is to assume nothing of
// it.
__attribute__((naked, noipa)) void switch_stacks(void** /*from: rdi*/, void* /*to: rsi*/) {
  asm("push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n"
      "mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n"
      "ret");
}
#else
ucontext_t resumer;
#endif

}  // namespace

Fiber::Fiber(void (*entry)()) : entry_(entry) {
  mapping_ = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::runtime_error("simt: no memory for a fiber's stack");
  mprotect(mapping_, kGuardBytes, PROT_NONE);  // an overflowing stack faults, it does not scribble
  char* stack = static_cast<char*>(mapping_) + kGuardBytes;
#if defined(__x86_64__)
  // As switch_stacks leaves it: six registers, then the address to go on at. begin() finds its stack as after a call.
  void** top = reinterpret_cast<void**>(stack + kStackBytes) - 8;
  for (int i = 0; i < 8; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(&begin);
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, &begin, 0);
#endif
#if defined(SIMT_THREAD)
  thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(SIMT_THREAD)
  __tsan_destroy_fiber(thread_);
#endif
  munmap(mapping_, kStackBytes + kGuardBytes);
}

void Fiber::begin() {
#if defined(SIMT_ADDRESS)
  __sanitizer_finish_switch_fiber(nullptr, &resumer_stack, &resumer_stack_bytes);
#endif
  running->entry_();
}

void Fiber::enter() {
#if defined(__x86_64__)
  switch_stacks(&resumer, stack_pointer_);
#else
  swapcontext(&resumer, &context_);
#endif
}
void Fiber::leave() {
#if defined(__x86_64__)
  switch_stacks(&running->stack_pointer_, resumer);
#else
  swapcontext(&running->context_, &resumer);
#endif
}

void Fiber::resume() {
  running = this;
#if defined(SIMT_ADDRESS)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, static_cast<char*>(mapping_) + kGuardBytes, kStackBytes);
  enter();
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#elif defined(SIMT_THREAD)
  resumer_thread = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_, __tsan_switch_to_fiber_no_sync);
  enter();
#else
  enter();
#endif
}

void Fiber::park() {
#if defined(SIMT_ADDRESS)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, resumer_stack, resumer_stack_bytes);
  leave();
  __sanitizer_finish_switch_fiber(fake, &resumer_stack, &resumer_stack_bytes);
#elif defined(SIMT_THREAD)
  __tsan_switch_to_fiber(resumer_thread, __tsan_switch_to_fiber_no_sync);
  leave();
#else
  leave();
#endif
}

}  // namespace simt
