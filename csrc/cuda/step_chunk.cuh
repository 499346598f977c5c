// One block's part of an optimizer step: where its elements are, and what is the same for all of them.
#pragma once

#include "device.h"  // before any formula: it says what __device__ is

#include "../optimizers.h"
#include "launchers.h"
#include "multi_tensor.h"
#include "reconcile.cuh"

namespace lightning_apex {

constexpr int kStepThreads = 256;

// A formula for one mixture of types: parameter, gradient, states; and whether there is a master.
template <class FormulaType, class ParamType, class GradType, class StateType, bool with_master>
struct StepCase {
  using Formula = FormulaType;
  using P = ParamType;
  using G = GradType;
  using S = StateType;
  using Compute = compute_t<P>;
  using Consts = typename Formula::template Consts<Compute>;
  static constexpr bool has_master = with_master;
  static constexpr int n_state = Formula::n_state, n_tensor_state = Formula::n_tensor_state, n_norms = Formula::n_norms;
  static constexpr int kStates = n_state > 0 ? n_state : 1;  // of arrays, which cannot be empty

  // The addresses of a tensor, in the order of its table entry.
  static constexpr int kParam = 0, kGrad = 1, kStep = 2, kMaster = 3, kState = 3 + has_master,
                       kTensorState = kState + n_state, kPointers = kTensorState + n_tensor_state;
  using Entry = TensorEntry<kPointers>;
  using Table = TensorTable<kPointers>;

  static constexpr int smallest(int a, int b) { return a < b ? a : b; }
  static constexpr int kWidth = 16 / smallest(sizeof(P), smallest(sizeof(G), sizeof(S)));
};

// The elements of a chunk.
template <class Case>
struct StepChunk {
  typename Case::P* param;
  const typename Case::G* grad;
  float* master;
  typename Case::S* state[Case::kStates];

  __device__ __forceinline__ StepChunk(const typename Case::Entry& entry, int64_t begin) {
    param = static_cast<typename Case::P*>(entry.data[Case::kParam]) + begin;
    grad = static_cast<const typename Case::G*>(entry.data[Case::kGrad]) + begin;
    if constexpr (Case::has_master) master = static_cast<float*>(entry.data[Case::kMaster]) + begin;
#pragma unroll
    for (int k = 0; k < Case::n_state; ++k)
      state[k] = static_cast<typename Case::S*>(entry.data[Case::kState + k]) + begin;
  }

  __device__ __forceinline__ bool aligned() const {
    constexpr int N = Case::kWidth;
    bool all = is_aligned<N>(param) && is_aligned<N>(grad);
    if constexpr (Case::has_master) all = all && is_aligned<N>(master);
#pragma unroll
    for (int k = 0; k < Case::n_state; ++k) all = all && is_aligned<N>(state[k]);
    return all;
  }
};

// N neighbours on their way through a kernel.
template <class Case, int N>
struct StepVec {
  using Compute = typename Case::Compute;
  Vec<typename Case::P, N> param;
  Vec<typename Case::G, N> grad{};
  Vec<float, N> master;
  Vec<typename Case::S, N> state[Case::kStates];

  __device__ __forceinline__ void load_values(const StepChunk<Case>& chunk, int i) {
    param = load<N>(chunk.param + i);
    if constexpr (Case::has_master) master = load<N>(chunk.master + i);
  }
  __device__ __forceinline__ void load_states(const StepChunk<Case>& chunk, int i) {
#pragma unroll
    for (int k = 0; k < Case::n_state; ++k) state[k] = load<N>(chunk.state[k] + i);
  }
  __device__ __forceinline__ void load_grad(const StepChunk<Case>& chunk, int i) { grad = load<N>(chunk.grad + i); }

  __device__ __forceinline__ void store_states(const StepChunk<Case>& chunk, int i) const {
#pragma unroll
    for (int k = 0; k < Case::n_state; ++k) store(chunk.state[k] + i, state[k]);
  }
  __device__ __forceinline__ void store_values(const StepChunk<Case>& chunk, int i) const {
    store(chunk.param + i, param);
    if constexpr (Case::has_master) store(chunk.master + i, master);
  }

  // Element j: the value that the formula works on, and back.
  __device__ __forceinline__ Compute value(int j) const {
    if constexpr (Case::has_master) return reconcile(master.v[j], param.v[j]);
    return Compute(param.v[j]);
  }
  __device__ __forceinline__ void set_value(int j, Compute value) {
    if constexpr (Case::has_master) master.v[j] = value;
    param.v[j] = typename Case::P(value);
  }
  __device__ __forceinline__ void get_states(int j, Compute (&states)[Case::kStates]) const {
#pragma unroll
    for (int k = 0; k < Case::n_state; ++k) states[k] = Compute(state[k].v[j]);
  }
  __device__ __forceinline__ void set_states(int j, const Compute (&states)[Case::kStates]) {
#pragma unroll
    for (int k = 0; k < Case::n_state; ++k) state[k].v[j] = typename Case::S(states[k]);
  }
};

__device__ __forceinline__ bool is_skipped(const StepArguments& arguments) {
  return arguments.found_inf != nullptr && *arguments.found_inf != 0;
}
template <class Compute>
__device__ __forceinline__ Compute multiplier_of(const StepArguments& arguments) {
  return arguments.multiplier != nullptr ? Compute(*arguments.multiplier) : Compute(1);
}

template <class Formula>
struct Hypers {
  double h[Formula::n_hyper];
  __device__ __forceinline__ explicit Hypers(const StepArguments& arguments) {
#pragma unroll
    for (int i = 0; i < Formula::n_hyper; ++i) h[i] = arguments.hypers[i];
    if (arguments.lr != nullptr) h[0] = read_scalar(arguments.lr, arguments.lr_dtype);
  }
};

// A tensor's number of this update: 1 at the first. In double, which goes on counting where float32 stands still.
template <class Case>
__device__ __forceinline__ double step_of(const typename Case::Entry& entry) {
  return double(*static_cast<const float*>(entry.data[Case::kStep])) + 1;
}

}  // namespace lightning_apex
