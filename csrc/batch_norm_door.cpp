#include "batch_norm_door.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "tensor_facts.h"

namespace lightning_apex {

namespace {

// Whether the channels lie side by side and the other dimensions follow in their order, for any number of them.
bool channels_innermost(const Tensor& t) {
  int64_t expected = t.size(1);
  const auto steps = [&](int64_t d) {
    const bool as_expected = t.size(d) == 1 || t.stride(d) == expected;
    expected *= t.size(d);
    return as_expected;
  };
  for (int64_t d = t.dim() - 1; d >= 2; --d)
    if (!steps(d)) return false;
  return steps(0) && (t.size(1) == 1 || t.stride(1) == 1);
}

void check_dense(const char* op, const char* name, const Tensor& t, at::Device device) {
  TORCH_CHECK_TYPE(t.defined(), op, ": ", name, " is undefined");
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op, ": ", name, " has layout ", t.layout(),
                              "; only dense tensors are supported, call .to_dense() first");
  TORCH_CHECK_VALUE(t.device() == device, op, ": ", name, " is on ", t.device(), ", expected ", device,
                    " as for input");
}

void check_float(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_TYPE(is_float(t.scalar_type()), op, ": ", name, " is ", dtype_name(t.scalar_type()),
                   "; expected torch.float32, torch.float16, torch.bfloat16 or torch.float64");
}

void check_statistic(const char* op, const char* name, const Tensor& t, at::IntArrayRef sizes, at::Device device) {
  check_dense(op, name, t, device);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kDouble, op, ": ", name, " is ", dtype_name(t.scalar_type()),
                   "; statistics are torch.float64 whatever the input is");
  TORCH_CHECK_VALUE(t.sizes() == sizes, op, ": ", name, " has shape ", t.sizes(), ", expected ", sizes);
}

}  // namespace

BatchNormTensors::BatchNormTensors(const char* op, const Tensor& input, at::Device device) : op_(op) {
  check_dense(op, "input", input, device);
  check_float(op, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 2, op, ": input has shape ", input.sizes(),
                    "; expected (N, C) or (N, C, ...), with the channels second");
  const at::NoGradGuard no_grad;
  const bool as_it_is = input.is_contiguous() || channels_innermost(input);
  input_ = as_it_is ? input : input.contiguous(input.suggest_memory_format());
  shape_ = {input.size(0), input.size(1), 1, false};
  for (int64_t d = 2; d < input.dim(); ++d) shape_.spatial *= input.size(d);
  shape_.rows = shape_.spatial == 1 || !input_.is_contiguous();
}

Tensor BatchNormTensors::follow(const char* name, const Tensor& t) const {
  check_dense(op_, name, t, input_.device());
  TORCH_CHECK_TYPE(t.scalar_type() == input_.scalar_type(), op_, ": ", name, " is ", dtype_name(t.scalar_type()),
                   ", expected ", dtype_name(input_.scalar_type()), " as for input");
  TORCH_CHECK_VALUE(t.sizes() == input_.sizes(), op_, ": ", name, " has shape ", t.sizes(), ", expected ",
                    input_.sizes(), " as for input");
  if (same_order(t, input_)) return t;
  const at::NoGradGuard no_grad;
  Tensor copy = at::empty_strided(t.sizes(), input_.strides(), t.options().requires_grad(false));
  copy.copy_(t);
  return copy;
}

OptionalTensor BatchNormTensors::follow(const char* name, const OptionalTensor& t) const {
  if (!t.has_value()) return std::nullopt;
  return follow(name, *t);
}

Tensor BatchNormTensors::new_output() const {
  return at::empty_strided(input_.sizes(), input_.strides(), input_.options().requires_grad(false));
}

Tensor BatchNormTensors::new_statistic(int64_t numel) const {
  return at::empty({numel}, at::TensorOptions().device(input_.device()).dtype(at::kDouble));
}

Tensor BatchNormTensors::statistic(const char* name, const Tensor& t) const {
  check_statistic(op_, name, t, {shape_.channels}, input_.device());
  const at::NoGradGuard no_grad;
  return t.contiguous();
}

OptionalTensor BatchNormTensors::parameter(const char* name, const OptionalTensor& t) const {
  if (!t.has_value()) return std::nullopt;
  check_dense(op_, name, *t, input_.device());
  check_float(op_, name, *t);
  TORCH_CHECK_VALUE(t->sizes() == at::IntArrayRef{shape_.channels}, op_, ": ", name, " has shape ", t->sizes(),
                    ", expected [", shape_.channels, "], one number for each channel of input");
  const at::NoGradGuard no_grad;
  return t->contiguous();
}

RankMoments::RankMoments(const char* op, const Tensor& means_, const Tensor& m2s_, const Tensor& counts_,
                         at::Device device) {
  TORCH_CHECK_VALUE(means_.dim() == 2, op, ": means has shape ", means_.sizes(), "; expected (ranks, channels)");
  check_statistic(op, "means", means_, means_.sizes(), device);
  check_statistic(op, "m2s", m2s_, means_.sizes(), device);
  check_statistic(op, "counts", counts_, {means_.size(0)}, device);
  const at::NoGradGuard no_grad;
  means = means_.contiguous();
  m2s = m2s_.contiguous();
  counts = counts_.contiguous();
}

Tensor RankMoments::new_statistic(int64_t numel) const {
  return at::empty({numel}, means.options().requires_grad(false));
}

void check_count(const char* op, const Tensor& count, at::Device device) {
  check_dense(op, "total_count", count, device);
  TORCH_CHECK_VALUE(count.scalar_type() == at::kDouble && count.numel() == 1, op,
                    ": total_count must be one torch.float64 number, it is ", dtype_name(count.scalar_type()),
                    " with shape ", count.sizes());
}

void check_running(const char* op, const OptionalTensor& mean, const OptionalTensor& var, int64_t channels,
                   at::Device device) {
  TORCH_CHECK_VALUE(mean.has_value() == var.has_value(), op, ": ", mean.has_value() ? "running_var" : "running_mean",
                    " is None and the other one is not; give both or neither");
  const std::pair<const char*, const OptionalTensor&> both[] = {{"running_mean", mean}, {"running_var", var}};
  for (const auto& [name, t] : both) {
    if (!t.has_value()) continue;
    check_dense(op, name, *t, device);
    check_float(op, name, *t);
    TORCH_CHECK_VALUE(t->sizes() == at::IntArrayRef{channels} && t->is_contiguous(), op, ": ", name, " has shape ",
                      t->sizes(), " and strides ", t->strides(), "; expected a contiguous [", channels, "]");
  }
}

void bump_versions(const OptionalTensor& a, const OptionalTensor& b) {
  for (const OptionalTensor* t : {&a, &b})
    if (t->has_value() && !(*t)->is_inference()) (*t)->unsafeGetTensorImpl()->bump_version();
}

}  // namespace lightning_apex
