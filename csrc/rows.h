// What the engines get for tensor i of the lists: raw pointers to runs of memory in the same element order.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lightning_apex {

using c10::ScalarType;

// The most that any row of optimizers.h has; optimizer_table.h checks it.
constexpr int kMaxStates = 4, kMaxTensorStates = 1, kMaxNorms = 2;

struct CopyRow {
  void* dst;  // == src where the operator works in place, nullptr where it only reads
  const void* src;
  int64_t numel;
  ScalarType dst_dtype, src_dtype;
};

struct StepRow {
  void* param;
  const void* grad;
  float* master;  // nullptr: the parameter is its own master
  void* state[kMaxStates];
  float* step;
  void* tensor_state[kMaxTensorStates];  // a double where the parameter is one, else a float
  double* norms;  // n_norms of them, as the first pass leaves them; nullptr: nobody has made room for them yet
  int64_t numel;
  ScalarType param_dtype, grad_dtype, state_dtype;
};

}  // namespace lightning_apex
