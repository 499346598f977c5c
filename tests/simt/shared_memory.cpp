#include "shared_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "launch_limits.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr size_t kGuard = 64, kMaxStatic = 48 << 10;
// Every byte, guards included, before it is written: floats read as NaN, integers as -1.
constexpr unsigned char kPoison = 0xff;
// A race detector remembers who used an address, so there no two blocks of a launch have the same.
constexpr size_t kArenaBytes = kFindsRaces ? size_t(1) << 30 : 1 << 20;

// The second guard begins where the array ends, whatever its size.
size_t total(size_t bytes) { return kGuard + (bytes + kGuard - 1) / kGuard * kGuard + kGuard; }

// Past the sanitizers, which would count it as a write of this thread.
unsigned char* map_arena() {
  const long memory = syscall(SYS_mmap, nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory < 0 && memory > -4096) throw std::runtime_error("simt: no memory for shared memory");
  forbid(reinterpret_cast<void*>(memory), kArenaBytes);
  return reinterpret_cast<unsigned char*>(memory);
}

}  // namespace

void SharedMemory::begin_launch() {
  if (arena_ == nullptr) arena_ = map_arena();
  used_ = 0;
}

void* SharedMemory::find(const void* key) const {
  for (const Array& a : arrays_)
    if (a.key == key) return a.memory + kGuard;
  return nullptr;
}

bool SharedMemory::fits(size_t bytes) const { return static_bytes_ + bytes <= kMaxStatic; }

void* SharedMemory::allocate(const void* key, size_t bytes, Where where) {
  if (used_ + total(bytes) > kArenaBytes) return nullptr;
  unsigned char* memory = arena_ + used_;
  used_ += total(bytes);
  permit(memory, total(bytes));
  std::fill(memory, memory + total(bytes), kPoison);
  forbid(memory, kGuard);
  forbid(memory + kGuard + bytes, total(bytes) - kGuard - bytes);
  if (key != nullptr) static_bytes_ += bytes;
  arrays_.push_back({key, memory, bytes, where});
  return memory + kGuard;
}

std::string SharedMemory::release() {
  std::string damage;
  for (const Array& a : arrays_) {
    permit(a.memory, total(a.bytes));
    for (size_t i = 0; i < total(a.bytes); ++i) {
      const bool inside = i >= kGuard && i < kGuard + a.bytes;
      if (inside || a.memory[i] == kPoison || !damage.empty()) continue;
      damage = "a write " + std::string(i < kGuard ? "before" : "past the end of") + " the shared array of " +
               std::to_string(a.bytes) + " bytes declared at " + text(a.where);
    }
    forbid(a.memory, total(a.bytes));
  }
  arrays_.clear();
  static_bytes_ = 0;
  if (!kFindsRaces) used_ = 0;
  return damage;
}

}  // namespace simt
