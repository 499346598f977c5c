// The norm of all gradients and the finiteness of each, in one read of them; norms of single tensors; what follows from
// it for the step; and how the loss scale moves.
#include "device.h"  // before any formula: it says what __device__ is

#include "../formulas/loss_scale.h"
#include "launchers.h"
#include "multi_tensor.h"
#include "reduce.cuh"

namespace lightning_apex {
namespace {

constexpr int kThreads = 512;

// Adds squares in double, in groups. A group's sum in float is as good while it is well inside float's range, and saves
// most double operations, which are slow on many GPUs. Outside the range each element is looked at.
template <class T>
struct SumOfSquares {
  double sum = 0;
  bool nonfinite = false;

  template <int N>
  __device__ __forceinline__ void add(const Vec<T, N>& x) {
    if constexpr (!std::is_same_v<T, double>) {
      float group = 0;
#pragma unroll
      for (int k = 0; k < N; ++k) group += float(x.v[k]) * float(x.v[k]);
      if (group > 1e-25f && group < 1e38f) {
        sum += double(group);
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const auto value = static_cast<compute_t<T>>(x.v[k]);
      if (!is_finite(value)) nonfinite = true;
      sum += double(value) * double(value);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    measure_kernel(const __grid_constant__ TensorTable<1> table, double* partials, uint8_t* nonfinite) {
  constexpr int kWidth = 16 / sizeof(T);
  const Chunk chunk = find_chunk(table, chunk_size(kNormChunk));
  const TensorEntry<1>& entry = entry_of(table, chunk.tensor);
  const T* x = static_cast<const T*>(entry.data[0]) + chunk.begin;
  SumOfSquares<T> squares;
  for_elements<kWidth>(chunk.size, is_aligned<kWidth>(x),
                       [&](auto width, int i) { squares.add(load<decltype(width)::value>(x + i)); });
  const double sum = block_reduce(squares.sum, Sum{});
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  if (squares.nonfinite) store_relaxed(nonfinite + entry.head.position, uint8_t(1));
}

// partials: one for each block of this launch.
template <class T>
__global__ void __launch_bounds__(kThreads) tensor_norms_kernel(const __grid_constant__ TensorTable<1> table,
                                                                NormMerge merge, double* partials, double* norms) {
  constexpr int kWidth = 16 / sizeof(T);
  const Chunk chunk = find_chunk(table, chunk_size(kNormChunk));
  const TensorEntry<1>& entry = entry_of(table, chunk.tensor);
  const T* x = static_cast<const T*>(entry.data[0]) + chunk.begin;
  double sofar[1] = {0};
  for_elements<kWidth>(chunk.size, is_aligned<kWidth>(x), [&](auto width, int i) {
    constexpr int N = decltype(width)::value;
    const Vec<T, N> values = load<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) sofar[0] = merge.add(sofar[0], double(compute_t<T>(values.v[k])));
  });
  reduce_over_tensor(sofar, merge, chunk, partials + (int(blockIdx.x) - chunk.index), table.arrivals + chunk.tensor,
                     norms + entry.head.position);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const double* partials, int64_t n, double* result) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += partials[i];
  sum = block_reduce(sum, Sum{});
  if (threadIdx.x == 0) *result = sum;
}

__global__ void __launch_bounds__(kThreads)
    step_factors_kernel(const double* sum_of_squares, const uint8_t* nonfinite, int64_t n, const float* scale,
                        double max_norm, float* found_inf, float* norm, float* multiplier) {
  int any = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) any |= nonfinite[i];
  any = __syncthreads_or(any);
  if (threadIdx.x != 0) return;
  if (any) *found_inf = 1;
  const StepFactors factors = step_factors(*sum_of_squares, scale != nullptr ? double(*scale) : 1.0, max_norm);
  *norm = factors.norm;
  *multiplier = factors.multiplier;
}

__global__ void update_scale_kernel(float* scale, int32_t* trackers, const float* found_inf, ScaleArguments a) {
  const ScaleRule rule{a.growth_factor, a.backoff_factor, a.growth_interval, a.hysteresis, a.min_scale, a.max_scale};
  const ScaleState next =
      next_scale({*scale, trackers[0], trackers[1], trackers[2], trackers[3]}, *found_inf != 0, rule);
  *scale = next.scale;
  trackers[0] = next.growth_tracker;
  trackers[1] = next.hysteresis_tracker;
  trackers[2] = next.consecutive_skips;
  trackers[3] = next.skipped_steps;
}

// Calls start(Tag<T>, table, chunks, chunks before) for the tensors of each type. The chunks follow the order of types
// and of the list, not of completion.
template <class Start>
void for_tensors_of_each_type(const std::vector<CopyRow>& rows, bool once_a_tensor, Tables& tables, Start&& start) {
  int64_t sofar = 0;
  for_each_type([&](auto tag) {
    TensorLister<1> list(chunk_size(kNormChunk), once_a_tensor);
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows[i].src_dtype == dtype_of<typename decltype(tag)::type>) list.add(int(i), rows[i].numel, {rows[i].src});
    list.launch_all(tables, [&](const TensorTable<1>& table, unsigned chunks, int64_t) {
      start(tag, table, chunks, sofar);
      sofar += chunks;
    });
  });
}

}  // namespace

void launch_measure(const std::vector<CopyRow>& grads, double* partials, int64_t n_partials, double* sum_of_squares,
                    uint8_t* nonfinite, Tables& tables) {
  const auto start = [&](auto tag, const TensorTable<1>& table, unsigned chunks, int64_t before) {
    launch(measure_kernel<typename decltype(tag)::type>, {chunks, block_threads(kThreads), 0, tables.stream()}, table,
           partials + before, nonfinite);
  };
  for_tensors_of_each_type(grads, false, tables, start);
  launch(sum_kernel, {1, block_threads(kThreads), 0, tables.stream()}, partials, n_partials, sum_of_squares);
}

void launch_tensor_norms(const std::vector<CopyRow>& tensors, bool maxima, double* partials, double* norms,
                         Tables& tables) {
  const auto start = [&](auto tag, const TensorTable<1>& table, unsigned chunks, int64_t before) {
    launch(tensor_norms_kernel<typename decltype(tag)::type>, {chunks, block_threads(kThreads), 0, tables.stream()},
           table, NormMerge{maxima}, partials + before, norms);
  };
  for_tensors_of_each_type(tensors, true, tables, start);
}

void launch_step_factors(const double* sum_of_squares, const uint8_t* nonfinite, int64_t n, const float* scale,
                         double max_norm, float* found_inf, float* norm, float* multiplier, Stream stream) {
  launch(step_factors_kernel, {1, block_threads(kThreads), 0, stream}, sum_of_squares, nonfinite, n, scale, max_norm,
         found_inf, norm, multiplier);
}

void launch_update_scale(float* scale, int32_t* trackers, const float* found_inf, const ScaleArguments& rule,
                         Stream stream) {
  launch(update_scale_kernel, {1, 1, 0, stream}, scale, trackers, found_inf, rule);
}

}  // namespace lightning_apex
