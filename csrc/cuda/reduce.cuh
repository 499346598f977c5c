// Sums and largest values over a block, and over all blocks that share a tensor. The order is fixed, so that equal
// input gives equal bits.
#pragma once

#include "device.h"
#include "multi_tensor.h"

namespace lightning_apex {

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
// How norms of parts make the norm of the whole: sums of squares add up, of maxima the larger one stays, and a NaN.
struct NormMerge {
  bool maxima;
  __device__ __forceinline__ double operator()(double a, double b) const {
    if (!maxima) return a + b;
    return b > a || b != b ? b : a;
  }
  // `sofar` with one more value, whatever its sign.
  __device__ __forceinline__ double add(double sofar, double value) const {
    return (*this)(sofar, maxima ? fabs(value) : value * value);
  }
};

template <class T, class Merge>
__device__ __forceinline__ T warp_reduce(T value, Merge merge) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = merge(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

// The result, in every thread of the first warp; merging with 0 changes nothing. The block is a whole number of warps.
template <class T, class Merge>
__device__ __forceinline__ T block_reduce(T value, Merge merge) {
  APEX_SHARED(of_warps, T[32]);
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  value = warp_reduce(value, merge);
  __syncthreads();  // an earlier call may still be reading of_warps
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  if (warp == 0) value = warp_reduce(lane < warps ? of_warps[lane] : T(0), merge);
  return value;
}

// Every block of a tensor brings what it gathered; the last to arrive writes what they make together to norms[0..n).
// `partials`: room for n numbers a chunk of this tensor. Called by all threads of a block.
template <int n>
__device__ __forceinline__ void reduce_over_tensor(double (&values)[n], NormMerge merge, const Chunk& chunk,
                                                   double* partials, uint32_t* arrivals, double* norms) {
#pragma unroll
  for (int k = 0; k < n; ++k) values[k] = block_reduce(values[k], merge);
  if (chunk.of > 1) {
    bool last = false;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int k = 0; k < n; ++k) partials[int64_t(chunk.index) * n + k] = values[k];
      last = arrives_last(arrivals, uint32_t(chunk.of));
    }
    if (!__syncthreads_or(last)) return;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      values[k] = 0;
      for (int i = int(threadIdx.x); i < chunk.of; i += int(blockDim.x))
        values[k] = merge(values[k], load_relaxed(partials + int64_t(i) * n + k));
      values[k] = block_reduce(values[k], merge);
    }
  }
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int k = 0; k < n; ++k) norms[k] = values[k];
}

}  // namespace lightning_apex
