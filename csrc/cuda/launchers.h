// What the host files (with ATen) ask of the kernel files (without): raw pointers, sizes and dtypes. Every launcher
// puts its work on its stream, of the current device, and reads nothing back.
#pragma once

#include <vector>

#include "../rows.h"
#include "device.h"
#include "tables.h"

namespace lightning_apex {

// The gradients' norm is summed over chunks of this size whatever the device, so that it is the same everywhere.
constexpr int kNormChunk = 65536;

constexpr int kStepChunk = 16384;  // elements that a block updates
constexpr int kMaxHypers = 16;     // of any row of optimizers.h

// One call's part of what the update kernel is given; the tensors are the other.
struct StepArguments {
  double hypers[kMaxHypers];
  const void* lr;  // replaces hypers[0]; nullptr: it does not
  ScalarType lr_dtype;
  const float *multiplier, *found_inf;  // nullptr: 1, never
  double* norms;  // as many a tensor as the formula has, in the order of the list: the first pass writes them
};

// A mixture of types: what chooses the kernel.
struct StepKind {
  ScalarType param, grad, state;
  bool has_master;
  bool operator==(const StepKind& b) const {
    return param == b.param && grad == b.grad && state == b.state && has_master == b.has_master;
  }
};
inline StepKind kind_of(const StepRow& row) {
  return {row.param_dtype, row.grad_dtype, row.state_dtype, row.master != nullptr};
}

struct StepPasses {
  int first_row;     // the first of its kind
  double* partials;  // for the first pass of a formula with norms: as many a chunk as it has; nullptr: leave it out
  bool update;       // make the second pass, or the only one
};

struct ScaleArguments {
  float growth_factor, backoff_factor;
  int growth_interval, hysteresis;
  float min_scale, max_scale;
};

// partials: a double for every chunk of every tensor. nonfinite: a byte a tensor, zero before the call.
void launch_measure(const std::vector<CopyRow>& grads, double* partials, int64_t n_partials, double* sum_of_squares,
                    uint8_t* nonfinite, Tables& tables);
// partials: as there. norms: one a tensor, the sum of squares or the largest magnitude.
void launch_tensor_norms(const std::vector<CopyRow>& tensors, bool maxima, double* partials, double* norms,
                         Tables& tables);
void launch_step_factors(const double* sum_of_squares, const uint8_t* nonfinite, int64_t n, const float* scale,
                         double max_norm, float* found_inf, float* norm, float* multiplier, Stream stream);
void launch_update_scale(float* scale, int32_t* trackers, const float* found_inf, const ScaleArguments& rule,
                         Stream stream);

// dst = src * multiplier; in place where both are the same address. nonfinite: zero before the call.
void launch_copy_scaled(const std::vector<CopyRow>& rows, const float* multiplier, uint8_t* nonfinite, float* found_inf,
                        Tables& tables);
// dst: fp32 masters; src: their parameters.
void launch_reconcile(const std::vector<CopyRow>& rows, Tables& tables);

// One step, by row `optimizer` of optimizers.h, of the parameters that are of the kind of rows[passes.first_row], which
// are of type P; and one more in their step counts. Says whether it knows a kernel: the caller sees to it that all
// kinds are made.
template <class P, bool with_norms>
bool launch_step(int optimizer, const std::vector<StepRow>& rows, const StepArguments& arguments,
                 const StepPasses& passes, Tables& tables);

}  // namespace lightning_apex
