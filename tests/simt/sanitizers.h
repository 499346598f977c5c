// What AddressSanitizer and ThreadSanitizer have to be told: which stack is in use, which shared memory may be touched,
// and what orders threads. In a build without them these are nothing. The machine itself is never instrumented.
#pragma once

#include <cstddef>

#if defined(SIMT_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(SIMT_THREAD)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace simt {

#if defined(SIMT_THREAD)
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
#endif

// What was done before leave() on one thread is ordered before what is done after take() on another.
struct SyncPoint {
#if defined(SIMT_THREAD)
  void leave() { __tsan_release(this); }
  void take() { __tsan_acquire(this); }
  char unused;
#else
  void leave() {}
  void take() {}
#endif
};
// An address of the kernels' can be such a point, too.
inline SyncPoint& sync_point(const void* address) { return *static_cast<SyncPoint*>(const_cast<void*>(address)); }

// While one lives, what its thread reads, writes and allocates is the machine's, not a kernel's.
class Untracked {
 public:
  Untracked(const Untracked&) = delete;
  Untracked& operator=(const Untracked&) = delete;
#if defined(SIMT_THREAD)
  Untracked() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Untracked() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Untracked() {}
  ~Untracked() {}
#endif
};

#if defined(SIMT_ADDRESS)
inline void forbid(const void* memory, size_t bytes) { __asan_poison_memory_region(memory, bytes); }
inline void permit(const void* memory, size_t bytes) { __asan_unpoison_memory_region(memory, bytes); }
#else
inline void forbid(const void*, size_t) {}
inline void permit(const void*, size_t) {}
#endif

}  // namespace simt
