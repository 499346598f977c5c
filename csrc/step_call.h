// The door of fused_step_ and fused_norms_.
#pragma once

#include <string_view>

#include "tensor_lists.h"

namespace lightning_apex {

// Of an optimizer with norms: fused_norms_ makes the first pass, fused_step_ the second, or both if no norms are given.
enum class Passes { first, all };

// The arguments of fused_step_ or fused_norms_ as the dispatcher hands them over.
struct StepCall {
  Passes passes;
  std::string_view name;
  TensorList params, grads, masters, states, steps;
  at::ArrayRef<double> hypers;
  const OptionalTensor &lr, &multiplier, &found_inf, &norms;
  const char* op() const { return passes == Passes::first ? "fused_norms_" : "fused_step_"; }
};

// Checks the call and returns the optimizer's place in the table.
int check_step(const StepCall& call, at::Device device);
// How many norms a tensor has: the columns of what fused_norms_ returns. Refuses an optimizer without any.
int64_t n_norms(const StepCall& call);
// `norms`: room for those of all tensors, or where they are. nullptr: of the call's own, if it has any.
std::vector<StepRow> step_rows(const StepCall& call, FlatViews& views, double* norms = nullptr);
void bump_versions(const StepCall& call);

}  // namespace lightning_apex
