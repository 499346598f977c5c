#include "shared_memory.h"

#include <cstdlib>
#include <cstring>

#include "launch_limits.h"

namespace simt {
namespace {

constexpr size_t kGuard = 64, kMaxStatic = 48 << 10;
// Every byte, guards included, before it is written: floats read as NaN, integers as -1.
constexpr unsigned char kPoison = 0xff;

// The second guard begins where the array ends, whatever its size.
size_t total(size_t bytes) { return kGuard + (bytes + kGuard - 1) / kGuard * kGuard + kGuard; }

}  // namespace

void* SharedMemory::find(const void* key) const {
  for (const Array& a : arrays_)
    if (a.key == key) return a.memory + kGuard;
  return nullptr;
}

bool SharedMemory::fits(size_t bytes) const { return static_bytes_ + bytes <= kMaxStatic; }

void* SharedMemory::allocate(const void* key, size_t bytes, Where where) {
  auto* memory = static_cast<unsigned char*>(std::aligned_alloc(64, total(bytes)));
  std::memset(memory, kPoison, total(bytes));
  if (key != nullptr) static_bytes_ += bytes;
  arrays_.push_back({key, memory, bytes, where});
  return memory + kGuard;
}

std::string SharedMemory::release() {
  std::string damage;
  for (const Array& a : arrays_) {
    for (size_t i = 0; i < total(a.bytes); ++i) {
      const bool inside = i >= kGuard && i < kGuard + a.bytes;
      if (inside || a.memory[i] == kPoison || !damage.empty()) continue;
      damage = "a write " + std::string(i < kGuard ? "before" : "past the end of") + " the shared array of " +
               std::to_string(a.bytes) + " bytes declared at " + text(a.where);
    }
    std::free(a.memory);
  }
  arrays_.clear();
  static_bytes_ = 0;
  return damage;
}

}  // namespace simt
