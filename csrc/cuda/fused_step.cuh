// The update of parameters, for any formula and any mixture of types. One translation unit a parameter type and kind of
// formula includes this, so that they compile side by side.
#pragma once

#include "fused_norms.cuh"
#include "step_chunk.cuh"

namespace lightning_apex {

template <class Case, int N>
__device__ __forceinline__ void update_elements(const StepChunk<Case>& chunk, int i, typename Case::Compute multiplier,
                                                const typename Case::Consts& consts) {
  using Formula = typename Case::Formula;
  using Compute = typename Case::Compute;
  StepVec<Case, N> vec;
  vec.load_values(chunk, i);
  vec.load_states(chunk, i);
  if constexpr (!Formula::advances_states) vec.load_grad(chunk, i);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    Compute value = vec.value(j), states[Case::kStates], grad = 0;
    if constexpr (!Formula::advances_states) grad = Compute(vec.grad.v[j]) * multiplier;
    vec.get_states(j, states);
    Formula::update(value, grad, states, consts);
    vec.set_value(j, value);
    if constexpr (!Formula::advances_states) vec.set_states(j, states);
  }
  vec.store_values(chunk, i);
  if constexpr (!Formula::advances_states) vec.store_states(chunk, i);
}

// What is the same for a whole tensor, by one thread of each of its blocks. When the last of them has read the step
// count and the states of one number, it renews them.
template <class Case>
__device__ __forceinline__ typename Case::Consts begin_update(const typename Case::Table& table, const Chunk& chunk,
                                                              const StepArguments& arguments) {
  using Formula = typename Case::Formula;
  using Compute = typename Case::Compute;
  const typename Case::Entry& entry = entry_of(table, chunk.tensor);
  const Hypers<Formula> hypers(arguments);
  const double step = step_of<Case>(entry);
  typename Case::Consts consts = Formula::template prepare<Compute>(hypers.h, step);
  double of_tensor[Case::n_tensor_state > 0 ? Case::n_tensor_state : 1];
  const auto tensor_state = [&](int k) { return static_cast<Compute*>(entry.data[Case::kTensorState + k]); };
#pragma unroll
  for (int k = 0; k < Case::n_tensor_state; ++k) of_tensor[k] = double(*tensor_state(k));
  if constexpr (Case::n_norms > 0)
    Formula::finish(hypers.h, step, arguments.norms + int64_t(entry.head.position) * Case::n_norms, of_tensor, consts);

  if (chunk.of == 1 || arrives_last(table.arrivals + chunk.tensor, uint32_t(chunk.of))) {
    *static_cast<float*>(entry.data[Case::kStep]) += 1;
#pragma unroll
    for (int k = 0; k < Case::n_tensor_state; ++k) *tensor_state(k) = Compute(of_tensor[k]);
  }
  return consts;
}

template <class Case>
__global__ void __launch_bounds__(kStepThreads)
    fused_step_kernel(const __grid_constant__ typename Case::Table table, const StepArguments arguments) {
  if (is_skipped(arguments)) return;
  APEX_SHARED(shared_consts, typename Case::Consts);
  const Chunk chunk = find_chunk(table, chunk_size(kStepChunk));
  if (threadIdx.x == 0) shared_consts = begin_update<Case>(table, chunk, arguments);
  __syncthreads();
  const typename Case::Consts consts = shared_consts;
  const auto multiplier = multiplier_of<typename Case::Compute>(arguments);
  const StepChunk<Case> elements(entry_of(table, chunk.tensor), chunk.begin);
  for_elements<Case::kWidth>(chunk.size, elements.aligned(), [&](auto width, int i) {
    update_elements<Case, decltype(width)::value>(elements, i, multiplier, consts);
  });
}

// Starts the passes over those rows whose types are these.
template <class Case>
void start_case(const std::vector<StepRow>& rows, const StepArguments& arguments, const StepPasses& passes,
                Tables& tables) {
  TensorLister<Case::kPointers> list(chunk_size(kStepChunk), /*for_empty=*/true);
  const StepKind kind = kind_of(rows[size_t(passes.first_row)]);
  for (size_t i = size_t(passes.first_row); i < rows.size(); ++i) {
    const StepRow& row = rows[i];
    if (!(kind_of(row) == kind)) continue;
    const void* data[Case::kPointers] = {row.param, row.grad, row.step};
    if constexpr (Case::has_master) data[Case::kMaster] = row.master;
    for (int k = 0; k < Case::n_state; ++k) data[Case::kState + k] = row.state[k];
    for (int k = 0; k < Case::n_tensor_state; ++k) data[Case::kTensorState + k] = row.tensor_state[k];
    list.add(int(i), row.numel, data);
  }
  if constexpr (Case::n_norms > 0)
    if (passes.partials != nullptr)
      list.launch_all(tables, [&](const typename Case::Table& table, unsigned chunks, int64_t before) {
        launch(fused_norms_kernel<Case>, {chunks, block_threads(kStepThreads), 0, tables.stream()}, table, arguments,
               passes.partials + before * Case::n_norms);
      });
  if (passes.update)
    list.launch_all(tables, [&](const typename Case::Table& table, unsigned chunks, int64_t) {
      launch(fused_step_kernel<Case>, {chunks, block_threads(kStepThreads), 0, tables.stream()}, table, arguments);
    });
}

// Calls f(Tag<a StepCase>) if parameters of type P come in the mixture `kind`. Says whether they do.
template <class Formula, class P, class F>
bool with_case(const StepKind& kind, F&& f) {
  bool known = false;
  const auto look_at = [&](auto grad, auto state, auto has_master) {
    using G = typename decltype(grad)::type;
    using S = typename decltype(state)::type;
    if (!(kind == StepKind{dtype_of<P>, dtype_of<G>, dtype_of<S>, has_master()})) return;
    known = true;
    f(Tag<StepCase<Formula, P, G, S, has_master()>>{});
  };
  const auto with_state = [&](auto state) {
    look_at(Tag<P>{}, state, std::false_type{});
    if constexpr (sizeof(P) == 2) {
      look_at(Tag<float>{}, state, std::false_type{});
      look_at(Tag<P>{}, state, std::true_type{});
      look_at(Tag<float>{}, state, std::true_type{});
    }
  };
  with_state(Tag<compute_t<P>>{});
  if constexpr (Formula::n_state > 0 && !std::is_same_v<P, double>) with_state(Tag<c10::BFloat16>{});
  return known;
}

template <class P, bool with_norms>
bool launch_step(int optimizer, const std::vector<StepRow>& rows, const StepArguments& arguments,
                 const StepPasses& passes, Tables& tables) {
  int index = 0;
  bool known = false;
  const auto look_at = [&](auto formula) {
    using Formula = typename decltype(formula)::type;
    if (index++ != optimizer) return;
    if constexpr ((Formula::n_norms > 0) == with_norms)
      known = with_case<Formula, P>(kind_of(rows[size_t(passes.first_row)]), [&](auto chosen) {
        start_case<typename decltype(chosen)::type>(rows, arguments, passes, tables);
      });
  };
#define LIGHTNING_APEX_LOOK_AT(...) look_at(Tag<__VA_ARGS__>{});
  LIGHTNING_APEX_OPTIMIZERS(LIGHTNING_APEX_LOOK_AT)
#undef LIGHTNING_APEX_LOOK_AT
  return known;
}

}  // namespace lightning_apex
