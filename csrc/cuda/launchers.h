// What the host files (with ATen) ask of the kernel files (without): raw pointers, sizes and dtypes. Every launcher
// puts its work on `stream`, of the current device, and reads nothing back.
#pragma once

#include <vector>

#include "../rows.h"
#include "device.h"

namespace lightning_apex {

// The gradients' norm is summed over chunks of this size whatever the device, so that it is the same everywhere.
constexpr int kNormChunk = 65536;

constexpr int kMaxHypers = 16;  // of any row of optimizers.h

// One call's part of what the update kernel is given; the tensors are the other.
struct StepArguments {
  double hypers[kMaxHypers];
  const void* lr;  // replaces hypers[0]; nullptr: it does not
  ScalarType lr_dtype;
  const float *multiplier, *found_inf;  // nullptr: 1, never
};

struct ScaleArguments {
  float growth_factor, backoff_factor;
  int growth_interval, hysteresis;
  float min_scale, max_scale;
};

// partials: a double for every chunk of every tensor. nonfinite: a byte a tensor, zero before the call.
void launch_measure(const std::vector<CopyRow>& grads, double* partials, int64_t n_partials, double* sum_of_squares,
                    uint8_t* nonfinite, Stream stream);
void launch_step_factors(const double* sum_of_squares, const uint8_t* nonfinite, int64_t n, const float* scale,
                         double max_norm, float* found_inf, float* norm, float* multiplier, Stream stream);
void launch_update_scale(float* scale, int32_t* trackers, const float* found_inf, const ScaleArguments& rule,
                         Stream stream);

// dst = src * multiplier; in place where both are the same address. nonfinite: zero before the call.
void launch_copy_scaled(const std::vector<CopyRow>& rows, const float* multiplier, uint8_t* nonfinite, float* found_inf,
                        Stream stream);
// dst: fp32 masters; src: their parameters.
void launch_reconcile(const std::vector<CopyRow>& rows, Stream stream);

// One update, by row `optimizer` of optimizers.h, of those parameters that are of type P; the list may be mixed.
// Returns how many it knew a kernel for: the caller sees to it that none is left over.
template <class P>
size_t launch_fused_step(int optimizer, const std::vector<StepRow>& rows, const StepArguments& arguments,
                         Stream stream);
// The last launch of a step: the counts go up by one.
void launch_advance_steps(const std::vector<float*>& steps, const float* found_inf, Stream stream);

}  // namespace lightning_apex
