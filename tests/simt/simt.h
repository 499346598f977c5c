// What csrc/cuda/device.h includes instead of CUDA under -DSIMT_EMU: the subset of CUDA that our kernels use, on the
// machine of machine.h. Test-only.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define SIMT_SHARED(name, ...)                                                             \
  auto& name = *static_cast<::lightning_apex::Exactly<__VA_ARGS__>*>(::simt::shared_array( \
      [] {                                                                                 \
        static char key;                                                                   \
        return &key;                                                                       \
      }(),                                                                                 \
      sizeof(::lightning_apex::Exactly<__VA_ARGS__>), ::simt::Where::current()))
#define SIMT_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::simt::dynamic_shared(::simt::Where::current()))

inline void __syncthreads(simt::Where where = simt::Where::current()) { simt::block_barrier(0, where); }
inline int __syncthreads_or(int vote, simt::Where where = simt::Where::current()) {
  return simt::block_barrier(vote, where).any;
}
inline int __syncthreads_count(int vote, simt::Where where = simt::Where::current()) {
  return simt::block_barrier(vote, where).count;
}

inline void __syncwarp(unsigned mask = ~0u, simt::Where where = simt::Where::current()) {
  simt::warp_meet(simt::WarpOp::sync, mask, 0, nullptr, nullptr, 0, where);
}
inline unsigned __ballot_sync(unsigned mask, int vote, simt::Where where = simt::Where::current()) {
  const bool yes = vote != 0;
  unsigned result;
  simt::warp_meet(simt::WarpOp::vote, mask, 0, &yes, &result, sizeof(yes), where);
  return result;
}
inline int __any_sync(unsigned mask, int vote, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, vote, where) != 0;
}
inline int __all_sync(unsigned mask, int vote, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, vote, where) == mask;
}

namespace simt {
template <class T>
T shuffle(unsigned mask, T value, int lane, Where where) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles words of 4 or 8 bytes");
  T result;
  warp_meet(WarpOp::shuffle, mask, lane, &value, &result, sizeof(T), where);
  return result;
}
}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, simt::Where where = simt::Where::current()) {
  return simt::shuffle(mask, value, lane & 31, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, simt::Where where = simt::Where::current()) {
  const int self = simt::lane_of_this_thread(), lane = self + int(delta);
  return simt::shuffle(mask, value, lane < 32 ? lane : self, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, simt::Where where = simt::Where::current()) {
  return simt::shuffle(mask, value, simt::lane_of_this_thread() ^ bits, where);
}

// Blocks and threads take turns, so what is done between two of their calls is atomic. The builtins tell it to a race
// detector.
template <class T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  T old, sum;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  sum = old + value;
  __atomic_store(address, &sum, __ATOMIC_RELAXED);
  return old;
}
// Counts to `last`, then starts from 0: our kernels count the blocks of a tensor with it.
inline unsigned atomicInc(unsigned* address, unsigned last, simt::Where where = simt::Where::current()) {
  const unsigned absent = simt::count_arrival(address, where);
  const unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED) + absent;
  __atomic_store_n(address, old >= last ? 0 : old + 1, __ATOMIC_RELAXED);
  return old;
}
inline void __threadfence() { simt::fence(); }
