// Sums over a block. The order of additions is fixed, so that equal input gives equal bits.
#pragma once

#include "device.h"

namespace lightning_apex {

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

// The sum, in every thread of the first warp. The block is a whole number of warps.
template <class T>
__device__ __forceinline__ T block_sum(T value) {
  APEX_SHARED(of_warps, T[32]);
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  value = warp_sum(value);
  __syncthreads();  // an earlier call may still be reading of_warps
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  if (warp == 0) value = warp_sum(lane < warps ? of_warps[lane] : T(0));
  return value;
}

}  // namespace lightning_apex
