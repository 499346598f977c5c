// What batch norm makes of every element, forward and backward.
#include "batch_norm.cuh"

namespace lightning_apex {
namespace {

template <class T, int N, class Constants>
__device__ __forceinline__ void project(const ForwardPointers& s, int64_t at, const Constants& of) {
  using S = compute_t<T>;
  const Vec<T, N> x = load<N>(static_cast<const T*>(s.x) + at);
  Vec<T, N> z, out;
  if (s.z != nullptr) z = load<N>(static_cast<const T*>(s.z) + at);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const Projection<S> p = of(k);
    S y = (S(x.v[k]) - p.mean) * p.scale + p.shift;
    if (s.z != nullptr) y += S(z.v[k]);
    if (s.relu) y = maximum(y, S(0));
    out.v[k] = T(y);
  }
  store(static_cast<T*>(s.out) + at, out);
}

template <class T, int N, class Constants>
__device__ __forceinline__ void grad(const BackwardPointers& s, int64_t at, const Constants& of) {
  using S = compute_t<T>;
  const Vec<T, N> dy = load_dy<N, T>(s, at), x = load<N>(static_cast<const T*>(s.x) + at);
  Vec<T, N> dx;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const GradProjection<S> p = of(k);
    dx.v[k] = T(S(dy.v[k]) * p.by_dy + (S(x.v[k]) - p.mean) * p.by_x + p.shift);
  }
  store(static_cast<T*>(s.dx) + at, dx);
  if (s.dz != nullptr) store(static_cast<T*>(s.dz) + at, dy);
}

struct GradSumsOfAll {
  const double *dy, *dy_xhat, *count;
};

template <class S>
__device__ __forceinline__ Projection<S> projection_of(const NormPointers& norm, int64_t channel) {
  return projection<S>(norm.mean[channel], norm.invstd[channel], read_channel(norm.weight, channel, 1),
                       read_channel(norm.bias, channel, 0));
}
template <class S>
__device__ __forceinline__ GradProjection<S> projection_of(const NormPointers& norm, const GradSumsOfAll& sums,
                                                           int64_t channel) {
  return grad_projection<S>(norm.mean[channel], norm.invstd[channel], read_channel(norm.weight, channel, 1),
                            sums.dy[channel], sums.dy_xhat[channel], *sums.count);
}

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads)
    plane_project_kernel(const BatchNormSplit split, const ForwardPointers s, const NormPointers norm) {
  using S = compute_t<T>;
  APEX_SHARED(shared, Projection<S>);
  const PlaneShare share(split);
  if (threadIdx.x == 0) shared = projection_of<S>(norm, share.channel);
  __syncthreads();
  const Projection<S> p = shared;
  share.each<N>(split, [&](int64_t at) { project<T, N>(s, at, [&](int) { return p; }); });
}

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads)
    row_project_kernel(const BatchNormSplit split, const ForwardPointers s, const NormPointers norm) {
  using S = compute_t<T>;
  const RowShare<N> share(split);
  Projection<S> p[N];
#pragma unroll
  for (int k = 0; k < N; ++k)
    p[k] = share.active ? projection_of<S>(norm, share.first_channel + k) : Projection<S>{0, 0, 0};
  share.each(split, [&](int64_t at) { project<T, N>(s, at, [&](int k) { return p[k]; }); });
}

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads)
    plane_grad_kernel(const BatchNormSplit split, const BackwardPointers s, const NormPointers norm,
                      const GradSumsOfAll sums) {
  using S = compute_t<T>;
  APEX_SHARED(shared, GradProjection<S>);
  const PlaneShare share(split);
  if (threadIdx.x == 0) shared = projection_of<S>(norm, sums, share.channel);
  __syncthreads();
  const GradProjection<S> p = shared;
  share.each<N>(split, [&](int64_t at) { grad<T, N>(s, at, [&](int) { return p; }); });
}

template <class T, int N>
__global__ void __launch_bounds__(kBatchNormThreads)
    row_grad_kernel(const BatchNormSplit split, const BackwardPointers s, const NormPointers norm,
                    const GradSumsOfAll sums) {
  using S = compute_t<T>;
  const RowShare<N> share(split);
  GradProjection<S> p[N];
#pragma unroll
  for (int k = 0; k < N; ++k)
    p[k] = share.active ? projection_of<S>(norm, sums, share.first_channel + k) : GradProjection<S>{0, 0, 0, 0};
  share.each(split, [&](int64_t at) { grad<T, N>(s, at, [&](int k) { return p[k]; }); });
}

// A split whose blocks are worth their constants.
constexpr int64_t kBlocksWanted = 1024, kMostSeen = 128;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t between(int64_t low, int64_t x, int64_t high) { return x < low ? low : x > high ? high : x; }

}  // namespace

BatchNormSplit batch_norm_split(const BatchNormShape& shape, int width, bool aligned) {
  const int64_t run = shape.rows ? shape.channels : shape.spatial;
  BatchNormSplit split{shape, aligned && run % width == 0 ? width : 1, 1, 1, 0, 0};
  if (shape.numel() == 0) return split;
  int64_t threads_below = batch_norm_threads(), steps = shape.batch * shape.spatial;
  if (shape.rows) {
    const int64_t vectors = shape.channels / split.width;
    while (split.at_once < 32 && split.at_once < vectors) split.at_once *= 2;
    threads_below /= split.at_once;
    split.tiles = ceil_div(vectors, split.at_once);
  } else {
    steps /= split.width;
    split.tiles = shape.channels;
  }
  const int64_t most = shape.rows ? kMostSeen : kMostSeen / split.width;
  split.span = threads_below * between(1, ceil_div(steps * split.tiles, threads_below * kBlocksWanted), most);
  split.parts = ceil_div(steps, split.span);
  return split;
}

void launch_project(const BatchNormSplit& split, c10::ScalarType dtype, const ForwardPointers& s,
                    const NormPointers& norm, Stream stream) {
  if (split.blocks() == 0) return;
  const Grid grid(unsigned(split.blocks()), batch_norm_threads(), 0, stream);
  for_type_and_width(dtype, split, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int N = decltype(width)::value;
    launch(split.shape.rows ? row_project_kernel<T, N> : plane_project_kernel<T, N>, grid, split, s, norm);
  });
}

void launch_grad(const BatchNormSplit& split, c10::ScalarType dtype, const BackwardPointers& s,
                 const NormPointers& norm, const double* sum_dy, const double* sum_dy_xhat, const double* count,
                 Stream stream) {
  if (split.blocks() == 0) return;
  const Grid grid(unsigned(split.blocks()), batch_norm_threads(), 0, stream);
  const GradSumsOfAll sums{sum_dy, sum_dy_xhat, count};
  for_type_and_width(dtype, split, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int N = decltype(width)::value;
    launch(split.shape.rows ? row_grad_kernel<T, N> : plane_grad_kernel<T, N>, grid, split, s, norm, sums);
  });
}

}  // namespace lightning_apex
