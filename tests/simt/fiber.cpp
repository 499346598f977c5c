#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>

namespace simt {
namespace {

constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 4096;

Fiber* running = nullptr;

#if defined(__x86_64__)
void* resumer = nullptr;  // the stack pointer of whoever called resume()

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

Fiber::Fiber(void (*entry)()) {
  mapping_ = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::runtime_error("simt: no memory for a fiber's stack");
  mprotect(mapping_, kGuardBytes, PROT_NONE);  // an overflowing stack faults, it does not scribble
  char* stack = static_cast<char*>(mapping_) + kGuardBytes;
#if defined(__x86_64__)
  // As switch_stacks leaves it: six registers, then the address to go on at. `entry` finds its stack as after a call.
  void** top = reinterpret_cast<void**>(stack + kStackBytes) - 8;
  for (int i = 0; i < 8; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(entry);
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
}

Fiber::~Fiber() { munmap(mapping_, kStackBytes + kGuardBytes); }

// The two places where stacks change: annotations for the sanitizers belong around these switches.
void Fiber::resume() {
  running = this;
#if defined(__x86_64__)
  switch_stacks(&resumer, stack_pointer_);
#else
  swapcontext(&resumer, &context_);
#endif
}

void Fiber::park() {
#if defined(__x86_64__)
  switch_stacks(&running->stack_pointer_, resumer);
#else
  swapcontext(&running->context_, &resumer);
#endif
}

}  // namespace simt
