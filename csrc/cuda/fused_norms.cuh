// The first pass of an optimizer with norms: new states where the formula has it so, and the norms of every tensor.
#pragma once

#include "reduce.cuh"
#include "step_chunk.cuh"

namespace lightning_apex {

template <class Case, int N>
__device__ __forceinline__ void gather_elements(const StepChunk<Case>& chunk, int i, typename Case::Compute multiplier,
                                                const typename Case::Consts& consts, NormMerge merge,
                                                double (&norms)[Case::n_norms]) {
  using Formula = typename Case::Formula;
  using Compute = typename Case::Compute;
  StepVec<Case, N> vec;
  vec.load_grad(chunk, i);
  if constexpr (Formula::gathers_param) vec.load_values(chunk, i);
  if constexpr (Formula::advances_states) vec.load_states(chunk, i);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    Compute value = 0, states[Case::kStates] = {}, gathered[Case::n_norms];
    const Compute grad = Compute(vec.grad.v[j]) * multiplier;
    if constexpr (Formula::gathers_param) value = vec.value(j);
    if constexpr (Formula::advances_states) {
      vec.get_states(j, states);
      Formula::advance(value, grad, states, consts);
      vec.set_states(j, states);
      vec.get_states(j, states);  // as the second pass will find them
    }
    Formula::gather(value, grad, states, consts, gathered);
#pragma unroll
    for (int k = 0; k < Case::n_norms; ++k) norms[k] = merge.add(norms[k], double(gathered[k]));
  }
  if constexpr (Formula::advances_states) vec.store_states(chunk, i);
}

// partials: n_norms numbers for each block of this launch.
template <class Case>
__global__ void __launch_bounds__(kStepThreads) fused_norms_kernel(const __grid_constant__ typename Case::Table table,
                                                                   const StepArguments arguments, double* partials) {
  using Formula = typename Case::Formula;
  const Chunk chunk = find_chunk(table, chunk_size(kStepChunk));
  const typename Case::Entry& entry = entry_of(table, chunk.tensor);
  double* norms = arguments.norms + int64_t(entry.head.position) * Case::n_norms;
  if (is_skipped(arguments)) {
    if (chunk.index == 0 && threadIdx.x < Case::n_norms) norms[threadIdx.x] = 0;
    return;
  }

  APEX_SHARED(shared_consts, typename Case::Consts);
  const Hypers<Formula> hypers(arguments);
  if (threadIdx.x == 0)
    shared_consts = Formula::template prepare<typename Case::Compute>(hypers.h, step_of<Case>(entry));
  __syncthreads();
  const typename Case::Consts consts = shared_consts;
  const auto multiplier = multiplier_of<typename Case::Compute>(arguments);
  const NormMerge merge{Formula::takes_maxima(hypers.h)};

  double sums[Case::n_norms] = {};
  const StepChunk<Case> elements(entry, chunk.begin);
  for_elements<Case::kWidth>(chunk.size, elements.aligned(), [&](auto width, int i) {
    gather_elements<Case, decltype(width)::value>(elements, i, multiplier, consts, merge, sums);
  });
  double* of_tensor = partials + int64_t(int(blockIdx.x) - chunk.index) * Case::n_norms;
  reduce_over_tensor(sums, merge, chunk, of_tensor, table.arrivals + chunk.tensor, norms);
}

}  // namespace lightning_apex
