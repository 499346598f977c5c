// What batch norm finds out about every channel: mean and variance, and the sums of its backward pass. Parts of a
// channel first, then all parts together; the same for several ranks.
#include "batch_norm.cuh"

namespace lightning_apex {
namespace {

// Sums of d and d^2, d = x - pivot, pivot the first of at most kMostSeen elements (see moments_of_sums).
template <class S>
struct Seen {
  S pivot = 0, sum = 0, squares = 0;
  bool none = true;
  __device__ __forceinline__ void add(S x) {
    pivot = none ? x : pivot;
    none = false;
    const S d = x - pivot;
    sum += d;
    squares += d * d;
  }
  __device__ __forceinline__ Moments moments(int64_t count) const {
    if (count == 0) return {0, 0, 0};
    return moments_of_sums(double(pivot), double(sum), double(squares), double(count));
  }
};

// Of the warp, in its first lane.
__device__ __forceinline__ Moments warp_moments(Moments m) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Moments other{__shfl_down_sync(kFullWarp, m.mean, distance), __shfl_down_sync(kFullWarp, m.m2, distance),
                        __shfl_down_sync(kFullWarp, m.count, distance)};
    m = combine(m, other);
  }
  return m;
}

// Of the block, in its first thread.
__device__ __forceinline__ Moments block_moments(Moments m) {
  APEX_SHARED(of_warps, Moments[kBatchNormThreads / 32]);
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  m = warp_moments(m);
  if (lane == 0) of_warps[warp] = m;
  __syncthreads();
  if (warp == 0) m = warp_moments(lane < int(batch_norm_threads()) / 32 ? of_warps[lane] : Moments{0, 0, 0});
  return m;
}

// `mine`, and those of the threads below this one in the block, joined from far to near; right for the first row.
template <class V, class Join>
__device__ __forceinline__ V join_rows(V mine, int row, int rows, int at_once, V* shared, const Join& join) {
  __syncthreads();  // an earlier call may still be reading
  shared[threadIdx.x] = mine;
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) shared[threadIdx.x] = join(shared[threadIdx.x], shared[int(threadIdx.x) + half * at_once]);
  }
  return shared[threadIdx.x];
}

// ---- moments ----

// Blocks at work on a multiprocessor. Left to itself, the compiler wants one more than these, and spills for it.
constexpr int kBlocksOfPlanes = 5;
template <int N>
constexpr int kBlocksOfRows = N > 4 ? 3 : 4;

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads, kBlocksOfPlanes)
    plane_moments_kernel(const BatchNormSplit split, const T* x, const MomentParts to) {
  const PlaneShare share(split);
  Seen<compute_t<T>> seen;
  int64_t count = 0;
  share.each<N>(split, [&](int64_t at) {
    const Vec<T, N> v = load<N>(x + at);
#pragma unroll
    for (int k = 0; k < N; ++k) seen.add(compute_t<T>(v.v[k]));
    count += N;
  });
  const Moments m = block_moments(seen.moments(count));
  if (threadIdx.x != 0) return;
  to.means[share.part * to.channels + share.channel] = m.mean;
  to.m2s[share.part * to.channels + share.channel] = m.m2;
  if (share.channel == 0) to.counts[share.part] = m.count;
}

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads, kBlocksOfRows<N>)
    row_moments_kernel(const BatchNormSplit split, const T* x, const MomentParts to) {
  APEX_SHARED(shared, Moments[kBatchNormThreads]);
  const RowShare<N> share(split);
  Seen<compute_t<T>> seen[N];
  share.each(split, [&](int64_t at) {
    const Vec<T, N> v = load<N>(x + at);
#pragma unroll
    for (int k = 0; k < N; ++k) seen[k].add(compute_t<T>(v.v[k]));
  });
  const int64_t count = share.count();
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const Moments m = join_rows(seen[k].moments(count), share.row, share.step, split.at_once, &shared[0],
                                [](const Moments& a, const Moments& b) { return combine(a, b); });
    if (share.row != 0 || !share.active) continue;
    to.means[share.part * to.channels + share.first_channel + k] = m.mean;
    to.m2s[share.part * to.channels + share.first_channel + k] = m.m2;
    if (share.first_channel + k == 0) to.counts[share.part] = m.count;
  }
}

// A warp for each channel.
__global__ void __launch_bounds__(kBatchNormThreads) combine_kernel(const MomentParts of, const Combination to) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t channel = int64_t(blockIdx.x) * (batch_norm_threads() / 32) + threadIdx.x / 32;
  const bool active = channel < of.channels;
  Moments m{0, 0, 0};
  for (int64_t part = lane; active && part < of.parts; part += 32) {
    const int64_t at = part * of.channels + channel;
    m = combine(m, {of.means[at], of.m2s[at], of.counts[part]});
  }
  m = warp_moments(m);
  if (lane != 0 || !active) return;
  to.mean[channel] = m.mean;
  if (to.m2 != nullptr) to.m2[channel] = m.m2;
  if (to.invstd != nullptr) to.invstd[channel] = inverse_std(m, to.eps);
  if (to.total_count != nullptr && channel == 0) *to.total_count = m.count;
  if (to.running_mean.data == nullptr) return;
  const double mean = read_channel(to.running_mean, channel, 0), var = read_channel(to.running_var, channel, 0);
  write_channel(to.running_mean, channel, next_running_mean(mean, m, to.momentum));
  write_channel(to.running_var, channel, next_running_var(var, m, to.momentum));
}

// ---- the sums of the backward pass ----

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads)
    plane_grad_sums_kernel(const BatchNormSplit split, const BackwardPointers s, const double* means,
                           const GradSumPointers to) {
  using S = compute_t<T>;
  const PlaneShare share(split);
  const S mean = S(means[share.channel]);
  S sum = 0, sum_x = 0;
  share.each<N>(split, [&](int64_t at) {
    const Vec<T, N> dy = load_dy<N, T>(s, at), x = load<N>(static_cast<const T*>(s.x) + at);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sum += S(dy.v[k]);
      sum_x += S(dy.v[k]) * (S(x.v[k]) - mean);
    }
  });
  const double all = block_reduce(double(sum), Sum()), all_x = block_reduce(double(sum_x), Sum());
  if (threadIdx.x != 0) return;
  to.dy_parts[share.part * split.shape.channels + share.channel] = all;
  to.dy_x_parts[share.part * split.shape.channels + share.channel] = all_x;
}

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads)
    row_grad_sums_kernel(const BatchNormSplit split, const BackwardPointers s, const double* means,
                         const GradSumPointers to) {
  using S = compute_t<T>;
  APEX_SHARED(shared, double[kBatchNormThreads]);
  const RowShare<N> share(split);
  S mean[N], sum[N], sum_x[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    mean[k] = share.active ? S(means[share.first_channel + k]) : S(0);
    sum[k] = sum_x[k] = 0;
  }
  share.each(split, [&](int64_t at) {
    const Vec<T, N> dy = load_dy<N, T>(s, at), x = load<N>(static_cast<const T*>(s.x) + at);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sum[k] += S(dy.v[k]);
      sum_x[k] += S(dy.v[k]) * (S(x.v[k]) - mean[k]);
    }
  });
  const auto add = [](double a, double b) { return a + b; };
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const double all = join_rows(double(sum[k]), share.row, share.step, split.at_once, &shared[0], add);
    const double all_x = join_rows(double(sum_x[k]), share.row, share.step, split.at_once, &shared[0], add);
    if (share.row != 0 || !share.active) continue;
    to.dy_parts[share.part * split.shape.channels + share.first_channel + k] = all;
    to.dy_x_parts[share.part * split.shape.channels + share.first_channel + k] = all_x;
  }
}

// A warp for each channel.
template <class S>
__global__ void __launch_bounds__(kBatchNormThreads)
    add_grad_sums_kernel(int64_t parts, int64_t channels, const NormPointers norm, const GradSumPointers to) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t channel = int64_t(blockIdx.x) * (batch_norm_threads() / 32) + threadIdx.x / 32;
  const bool active = channel < channels;
  double sum = 0, sum_x = 0;
  for (int64_t part = lane; active && part < parts; part += 32) {
    sum += to.dy_parts[part * channels + channel];
    sum_x += to.dy_x_parts[part * channels + channel];
  }
  sum = warp_reduce(sum, Sum());
  sum_x = warp_reduce(sum_x, Sum());
  if (lane != 0 || !active) return;
  to.dy[channel] = sum;
  to.dy_xhat[channel] = sum_dy_xhat<S>(sum, sum_x, norm.mean[channel], norm.invstd[channel]);
}

unsigned blocks_of_warps(int64_t channels) {
  const int64_t warps = batch_norm_threads() / 32;
  return unsigned((channels + warps - 1) / warps);
}

}  // namespace

void launch_moments(const BatchNormSplit& split, c10::ScalarType dtype, const void* x, const MomentParts& parts,
                    Stream stream) {
  if (split.blocks() == 0) return;
  const Grid grid(unsigned(split.blocks()), batch_norm_threads(), 0, stream);
  for_type_and_width(dtype, split, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int N = decltype(width)::value;
    launch(split.shape.rows ? row_moments_kernel<T, N> : plane_moments_kernel<T, N>, grid, split,
           static_cast<const T*>(x), parts);
  });
}

void launch_combine(const MomentParts& parts, const Combination& to, Stream stream) {
  if (parts.channels == 0) return;
  launch(combine_kernel, {blocks_of_warps(parts.channels), batch_norm_threads(), 0, stream}, parts, to);
}

void launch_grad_sums(const BatchNormSplit& split, c10::ScalarType dtype, const BackwardPointers& s,
                      const NormPointers& norm, const GradSumPointers& sums, Stream stream) {
  if (split.blocks() > 0) {
    const Grid grid(unsigned(split.blocks()), batch_norm_threads(), 0, stream);
    for_type_and_width(dtype, split, [&](auto tag, auto width) {
      using T = typename decltype(tag)::type;
      constexpr int N = decltype(width)::value;
      launch(split.shape.rows ? row_grad_sums_kernel<T, N> : plane_grad_sums_kernel<T, N>, grid, split, s, norm.mean,
             sums);
    });
  }
  if (split.shape.channels == 0) return;
  const auto add = dtype == c10::ScalarType::Double ? add_grad_sums_kernel<double> : add_grad_sums_kernel<float>;
  launch(add, {blocks_of_warps(split.shape.channels), batch_norm_threads(), 0, stream}, split.parts,
         split.shape.channels, norm, sums);
}

}  // namespace lightning_apex
