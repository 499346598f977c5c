// What the batch norm kernels share: who works on which elements, and sums over blocks in a fixed order.
#pragma once

#include "device.h"  // before any formula: it says what __device__ is

#include "../formulas/batch_norm.h"
#include "batch_norm_launchers.h"
#include "reduce.cuh"

namespace lightning_apex {

constexpr int kBatchNormThreads = 256;  // at most: shared arrays have as much room
__host__ __device__ __forceinline__ unsigned batch_norm_threads() {
  return block_threads(kBatchNormThreads, kBatchNormThreads);
}

template <class T>
constexpr int kVectorWidth = 16 / int(sizeof(T));

// Vectors that a thread has under way at once. Of single elements, four would take a register more than there are at
// full occupancy, and spill it.
template <int N>
constexpr int kUnroll = N == 1 ? 2 : 4;

// Calls f(Tag<T>, std::integral_constant<int, N>) for the element type and the width of the split.
template <class F>
void for_type_and_width(c10::ScalarType dtype, const BatchNormSplit& split, F&& f) {
  for_each_type([&](auto tag) {
    using T = typename decltype(tag)::type;
    if (dtype != dtype_of<T>) return;
    if (split.width == 1)
      f(tag, std::integral_constant<int, 1>{});
    else
      f(tag, std::integral_constant<int, kVectorWidth<T>>{});
  });
}

__device__ __forceinline__ double read_channel(const ChannelPointer& p, int64_t channel, double otherwise) {
  if (p.data == nullptr) return otherwise;
  if (p.dtype == c10::ScalarType::Double) return static_cast<const double*>(p.data)[channel];
  if (p.dtype == c10::ScalarType::Float) return static_cast<const float*>(p.data)[channel];
  if (p.dtype == c10::ScalarType::Half) return float(static_cast<const c10::Half*>(p.data)[channel]);
  return float(static_cast<const c10::BFloat16*>(p.data)[channel]);
}
__device__ __forceinline__ void write_channel(const ChannelPointer& p, int64_t channel, double value) {
  if (p.dtype == c10::ScalarType::Double)
    static_cast<double*>(p.data)[channel] = value;
  else if (p.dtype == c10::ScalarType::Float)
    static_cast<float*>(p.data)[channel] = float(value);
  else if (p.dtype == c10::ScalarType::Half)
    static_cast<c10::Half*>(p.data)[channel] = c10::Half(float(value));
  else
    static_cast<c10::BFloat16*>(p.data)[channel] = c10::BFloat16(float(value));
}

// A block's share of planes: part of one channel.
struct PlaneShare {
  int64_t channel, part;
  __device__ __forceinline__ explicit PlaneShare(const BatchNormSplit& split)
      : channel(int64_t(blockIdx.x) % split.tiles), part(int64_t(blockIdx.x) / split.tiles) {}
  template <int N>
  __device__ __forceinline__ int64_t size(const BatchNormSplit& split) const {
    const int64_t left = split.shape.batch * (split.shape.spatial / N) - part * split.span;
    return (left < split.span ? left : split.span) * N;
  }
  // body(element), the first of N.
  template <int N, class Body>
  __device__ __forceinline__ void each(const BatchNormSplit& split, const Body& body) const {
    const int64_t per_plane = split.shape.spatial / N, all = split.shape.batch * per_plane;
    const int64_t first = part * split.span, last = first + split.span < all ? first + split.span : all;
    const bool small = all < int64_t(1) << 31;  // a division of 64 bits takes many instructions
#pragma unroll(kUnroll<N>)
    for (int64_t u = first + threadIdx.x; u < last; u += batch_norm_threads()) {
      const int64_t plane = small ? int64_t(uint32_t(u) / uint32_t(per_plane)) : u / per_plane;
      body((plane * split.shape.channels + channel) * split.shape.spatial + (u - plane * per_plane) * N);
    }
  }
};

// A thread's share of rows: N channels of every `step`-th row.
template <int N>
struct RowShare {
  int64_t part, first_channel, first_row, last_row;
  int column, row, step;  // in the block
  bool active;
  __device__ __forceinline__ explicit RowShare(const BatchNormSplit& split)
      : part(int64_t(blockIdx.x) / split.tiles),
        column(int(threadIdx.x) % split.at_once),
        row(int(threadIdx.x) / split.at_once),
        step(int(batch_norm_threads()) / split.at_once) {
    const int64_t rows = split.shape.batch * split.shape.spatial, end = (part + 1) * split.span;
    first_channel = (int64_t(blockIdx.x) % split.tiles * split.at_once + column) * N;
    active = first_channel < split.shape.channels;
    first_row = part * split.span + row;
    last_row = end < rows ? end : rows;
  }
  // How many rows the thread sees.
  __device__ __forceinline__ int64_t count() const {
    return !active || first_row >= last_row ? 0 : (last_row - first_row + step - 1) / step;
  }
  template <class Body>
  __device__ __forceinline__ void each(const BatchNormSplit& split, const Body& body) const {
    if (!active) return;
#pragma unroll(kUnroll<N>)
    for (int64_t r = first_row; r < last_row; r += step) body(r * split.shape.channels + first_channel);
  }
};

// dy, counted as 0 where a fused ReLU let nothing through.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_dy(const BackwardPointers& s, int64_t element) {
  Vec<T, N> dy = load<N>(static_cast<const T*>(s.dy) + element);
  if (s.out == nullptr) return dy;
  const Vec<T, N> out = load<N>(static_cast<const T*>(s.out) + element);
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (compute_t<T>(out.v[k]) <= 0) dy.v[k] = T(compute_t<T>(0));
  return dy;
}

}  // namespace lightning_apex
