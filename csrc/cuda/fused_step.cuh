// The update of parameters, for any formula and any mixture of types. One translation unit a parameter type includes
// this, so that they compile side by side.
#pragma once

#include "device.h"  // before any formula: it says what __device__ is

#include "../optimizers.h"
#include "launchers.h"
#include "multi_tensor.h"
#include "reconcile.cuh"

namespace lightning_apex {

constexpr int kStepThreads = 256, kStepChunk = 16384;

// Where an element lives, in the order of a table's addresses: parameter, gradient, step, [master], states.
template <class Formula, bool has_master>
constexpr int kStepPointers = 3 + (has_master ? 1 : 0) + Formula::n_state;
template <class Formula, bool has_master>
using StepTable = TensorTable<kStepPointers<Formula, has_master>>;

template <class Formula, class P, class G, class S, bool has_master>
struct StepChunk {
  using Compute = compute_t<P>;
  using Consts = typename Formula::template Consts<Compute>;
  static constexpr int kStates = Formula::n_state > 0 ? Formula::n_state : 1;

  P* param;
  const G* grad;
  float* master;
  S* state[kStates];

  template <int N>
  __device__ __forceinline__ bool aligned() const {
    bool all = is_aligned<N>(param) && is_aligned<N>(grad);
    if constexpr (has_master) all = all && is_aligned<N>(master);
#pragma unroll
    for (int k = 0; k < Formula::n_state; ++k) all = all && is_aligned<N>(state[k]);
    return all;
  }

  template <int N>
  __device__ __forceinline__ void update(int i, Compute multiplier, const Consts& consts) const {
    Vec<P, N> p = load<N>(param + i);
    const Vec<G, N> g = load<N>(grad + i);
    Vec<float, N> m;
    if constexpr (has_master) m = load<N>(master + i);
    Vec<S, N> s[kStates];
#pragma unroll
    for (int k = 0; k < Formula::n_state; ++k) s[k] = load<N>(state[k] + i);

#pragma unroll
    for (int j = 0; j < N; ++j) {
      Compute value = Compute(p.v[j]), states[kStates];
      if constexpr (has_master) value = reconcile(m.v[j], p.v[j]);
#pragma unroll
      for (int k = 0; k < Formula::n_state; ++k) states[k] = Compute(s[k].v[j]);
      Formula::update(value, Compute(g.v[j]) * multiplier, states, consts);
#pragma unroll
      for (int k = 0; k < Formula::n_state; ++k) s[k].v[j] = S(states[k]);
      if constexpr (has_master) m.v[j] = value;
      p.v[j] = P(value);
    }

    store(param + i, p);
    if constexpr (has_master) store(master + i, m);
#pragma unroll
    for (int k = 0; k < Formula::n_state; ++k) store(state[k] + i, s[k]);
  }
};

// What one thread of a block works out for all.
template <class Formula, class Compute>
__device__ __forceinline__ typename Formula::template Consts<Compute> prepare_consts(const StepArguments& arguments,
                                                                                     const float* step) {
  double hypers[Formula::n_hyper];
#pragma unroll
  for (int i = 0; i < Formula::n_hyper; ++i) hypers[i] = arguments.hypers[i];
  if (arguments.lr != nullptr) hypers[0] = read_scalar(arguments.lr, arguments.lr_dtype);
  return Formula::template prepare<Compute>(hypers, double(*step) + 1);
}

template <class Formula, class P, class G, class S, bool has_master>
__global__ void __launch_bounds__(kStepThreads)
    fused_step_kernel(const StepTable<Formula, has_master> table, const StepArguments arguments) {
  using Work = StepChunk<Formula, P, G, S, has_master>;
  using Compute = typename Work::Compute;
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0) return;

  APEX_SHARED(shared_consts, typename Work::Consts);
  const Chunk chunk = find_chunk(table, kStepChunk);
  const auto address = [&](int k) { return table.data[k][chunk.tensor]; };
  if (threadIdx.x == 0)
    shared_consts = prepare_consts<Formula, Compute>(arguments, static_cast<const float*>(address(2)));
  __syncthreads();
  const typename Work::Consts consts = shared_consts;
  const Compute multiplier = arguments.multiplier != nullptr ? Compute(*arguments.multiplier) : Compute(1);

  Work work;
  work.param = static_cast<P*>(address(0)) + chunk.begin;
  work.grad = static_cast<const G*>(address(1)) + chunk.begin;
  if constexpr (has_master) work.master = static_cast<float*>(address(3)) + chunk.begin;
#pragma unroll
  for (int k = 0; k < Formula::n_state; ++k) work.state[k] = static_cast<S*>(address(3 + has_master + k)) + chunk.begin;

  constexpr int smallest = sizeof(P) < sizeof(G) ? sizeof(P) : sizeof(G);
  constexpr int kWidth = 16 / (smallest < int(sizeof(S)) ? smallest : int(sizeof(S)));
  for_elements<kWidth>(chunk.size, work.template aligned<kWidth>(),
                       [&](auto width, int i) { work.template update<decltype(width)::value>(i, multiplier, consts); });
}

// Starts the update of those rows whose types are these. Returns how many they were.
template <class Formula, class P, class G, class S, bool has_master>
size_t start_kind(const std::vector<StepRow>& rows, const StepArguments& arguments, Stream stream) {
  constexpr int kPointers = kStepPointers<Formula, has_master>;
  auto writer = table_writer<kPointers>(kStepChunk, [&](const TensorTable<kPointers>& table, unsigned chunks) {
    launch(fused_step_kernel<Formula, P, G, S, has_master>, {chunks, kStepThreads, 0, stream}, table, arguments);
  });
  size_t count = 0;
  for (const StepRow& row : rows) {
    if (row.param_dtype != dtype_of<P> || row.grad_dtype != dtype_of<G>) continue;
    if ((Formula::n_state > 0 && row.state_dtype != dtype_of<S>) || (row.master != nullptr) != has_master) continue;
    const void* data[kPointers] = {row.param, row.grad, row.step};
    if constexpr (has_master) data[3] = row.master;
    for (int k = 0; k < Formula::n_state; ++k) data[3 + has_master + k] = row.state[k];
    writer.add(int(count++), row.numel, data);
  }
  writer.flush();
  return count;
}

// All mixtures of types that a parameter of type P may come in.
template <class Formula, class P>
size_t start_all_kinds(const std::vector<StepRow>& rows, const StepArguments& arguments, Stream stream) {
  size_t count = 0;
  const auto start = [&](auto grad, auto state, auto has_master) {
    count += start_kind<Formula, P, typename decltype(grad)::type, typename decltype(state)::type, has_master()>(
        rows, arguments, stream);
  };
  const auto start_with_state = [&](auto state) {
    constexpr bool is_half = sizeof(P) == 2;
    start(Tag<P>{}, state, std::false_type{});
    if constexpr (is_half) {
      start(Tag<float>{}, state, std::false_type{});
      start(Tag<P>{}, state, std::true_type{});
      start(Tag<float>{}, state, std::true_type{});
    }
  };
  start_with_state(Tag<compute_t<P>>{});
  if constexpr (Formula::n_state > 0 && !std::is_same_v<P, double>) start_with_state(Tag<c10::BFloat16>{});
  return count;
}

template <class P>
size_t launch_fused_step(int optimizer, const std::vector<StepRow>& rows, const StepArguments& arguments,
                         Stream stream) {
  int row = 0;
  size_t count = 0;
#define LIGHTNING_APEX_START(...) \
  if (row++ == optimizer) count = start_all_kinds<__VA_ARGS__, P>(rows, arguments, stream);
  LIGHTNING_APEX_OPTIMIZERS(LIGHTNING_APEX_START)
#undef LIGHTNING_APEX_START
  return count;
}

}  // namespace lightning_apex
