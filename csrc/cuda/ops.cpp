// The operators on CUDA tensors. Nothing here waits for the device or reads its memory: what is decided by a value on
// the device (a multiplier, found_inf, a step count) is decided by the kernels.
#include "host.h"  // before any formula: it says what __device__ is

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "../tensor_lists.h"
#include "launchers.h"

namespace lightning_apex {
namespace {

const float* read_pointer(const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr<float>() : nullptr; }
float* write_pointer(const OptionalTensor& t) { return t.has_value() ? t->mutable_data_ptr<float>() : nullptr; }

at::TensorOptions on(at::Device device, ScalarType dtype) { return at::TensorOptions().device(device).dtype(dtype); }

at::Device device_of(TensorList list, const OptionalTensor& value = std::nullopt) {
  if (!list.empty() && list[0].defined()) return list[0].device();
  return value.has_value() ? value->device() : at::Device(kGpu);
}

std::tuple<Tensor, Tensor> measure_gradients(TensorList grads) {
  const at::Device device = device_of(grads);
  check_list("measure_gradients", "grads", grads, device);
  const DeviceGuard guard(device);
  FlatViews views;
  const auto rows = single_rows(grads, Access::read, views);
  int64_t n_partials = 0;
  for (const CopyRow& row : rows) n_partials += (row.numel + kNormChunk - 1) / kNormChunk;

  Tensor sum_of_squares = at::empty({}, on(device, at::kDouble));
  Tensor nonfinite = at::zeros({int64_t(grads.size())}, on(device, at::kByte));
  const Tensor partials = at::empty({n_partials}, on(device, at::kDouble));
  launch_measure(rows, partials.mutable_data_ptr<double>(), n_partials, sum_of_squares.mutable_data_ptr<double>(),
                 nonfinite.mutable_data_ptr<uint8_t>(), current_stream());
  return {sum_of_squares, nonfinite};
}

std::tuple<Tensor, Tensor> step_factors(const Tensor& sum_of_squares, const Tensor& nonfinite,
                                        const OptionalTensor& scale, double max_norm, const Tensor& found_inf) {
  constexpr const char* op = "step_factors";
  const at::Device device = sum_of_squares.device();
  check_value(op, "sum_of_squares", sum_of_squares, at::kDouble, 1, device);
  check_value(op, "nonfinite", nonfinite, at::kByte, nonfinite.numel(), device);
  check_value(op, "scale", scale, at::kFloat, 1, device);
  check_value(op, "found_inf", found_inf, at::kFloat, 1, device);
  const DeviceGuard guard(device);
  Tensor norm = at::empty({}, on(device, at::kFloat)), multiplier = at::empty({}, on(device, at::kFloat));
  launch_step_factors(sum_of_squares.const_data_ptr<double>(), nonfinite.const_data_ptr<uint8_t>(), nonfinite.numel(),
                      read_pointer(scale), max_norm, found_inf.mutable_data_ptr<float>(),
                      norm.mutable_data_ptr<float>(), multiplier.mutable_data_ptr<float>(), current_stream());
  bump_versions(found_inf);
  return {norm, multiplier};
}

Tensor scale_rows(const std::vector<CopyRow>& rows, const OptionalTensor& multiplier, const OptionalTensor& found_inf,
                  at::Device device) {
  Tensor nonfinite = at::zeros({int64_t(rows.size())}, on(device, at::kByte));
  launch_copy_scaled(rows, read_pointer(multiplier), nonfinite.mutable_data_ptr<uint8_t>(), write_pointer(found_inf),
                     current_stream());
  if (found_inf.has_value()) bump_versions(*found_inf);
  return nonfinite;
}

Tensor unscale_(TensorList grads, const Tensor& multiplier, const OptionalTensor& found_inf) {
  constexpr const char* op = "unscale_";
  const at::Device device = device_of(grads, multiplier);
  check_value(op, "multiplier", multiplier, at::kFloat, 1, device);
  check_value(op, "found_inf", found_inf, at::kFloat, 1, device);
  check_list(op, "grads", grads, device);
  check_no_overlap(op, "grads", grads);
  const DeviceGuard guard(device);
  FlatViews views;
  Tensor nonfinite = scale_rows(single_rows(grads, Access::read_write, views), multiplier, found_inf, device);
  views.write_back();
  bump_versions(grads);
  return nonfinite;
}

Tensor copy_scaled_(TensorList dst, TensorList src, const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  const at::Device device = device_of(dst, multiplier);
  check_copy(dst, src, multiplier, found_inf, device);
  const DeviceGuard guard(device);
  FlatViews views;
  Tensor nonfinite = scale_rows(copy_rows(dst, src, views), multiplier, found_inf, device);
  views.write_back();
  bump_versions(dst);
  return nonfinite;
}

void reconcile_masters_(TensorList masters, TensorList params) {
  const at::Device device = device_of(masters);
  check_reconcile(masters, params, device);
  const DeviceGuard guard(device);
  FlatViews views;
  launch_reconcile(reconcile_rows(masters, params, views), current_stream());
  views.write_back();
  bump_versions(masters);
}

void update_scale_(const Tensor& scale, const Tensor& trackers, const Tensor& found_inf, double growth_factor,
                   double backoff_factor, int64_t growth_interval, int64_t hysteresis, double min_scale,
                   double max_scale) {
  constexpr const char* op = "update_scale_";
  const at::Device device = scale.device();
  check_value(op, "scale", scale, at::kFloat, 1, device);
  check_value(op, "trackers", trackers, at::kInt, 4, device);
  check_value(op, "found_inf", found_inf, at::kFloat, 1, device);
  const DeviceGuard guard(device);
  const ScaleArguments rule{float(growth_factor), float(backoff_factor), int(growth_interval),
                            int(hysteresis),      float(min_scale),      float(max_scale)};
  launch_update_scale(scale.mutable_data_ptr<float>(), trackers.mutable_data_ptr<int32_t>(),
                      found_inf.const_data_ptr<float>(), rule, current_stream());
  bump_versions({scale, trackers});
}

StepArguments step_arguments(const StepCall& call) {
  StepArguments arguments{};
  TORCH_INTERNAL_ASSERT(call.hypers.size() <= kMaxHypers);
  std::copy(call.hypers.begin(), call.hypers.end(), arguments.hypers);
  arguments.multiplier = read_pointer(call.multiplier);
  arguments.found_inf = read_pointer(call.found_inf);
  if (!call.lr.has_value()) return arguments;
  if (call.lr->device().type() != kGpu) {  // a number in host memory: nothing to wait for
    arguments.hypers[0] = call.lr->item<double>();
  } else {
    arguments.lr = call.lr->const_data_ptr();
    arguments.lr_dtype = call.lr->scalar_type();
  }
  return arguments;
}

void fused_step_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                 TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                 const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  const StepCall call{params, grads, masters, states, steps, hypers, lr, multiplier, found_inf};
  const at::Device device = device_of(params);
  const int optimizer = check_step(std::string(name), call, device);
  const DeviceGuard guard(device);
  FlatViews views;
  const auto rows = step_rows(call, views);
  const StepArguments arguments = step_arguments(call);
  size_t started = 0;
  for_each_type([&](auto tag) {
    started += launch_fused_step<typename decltype(tag)::type>(optimizer, rows, arguments, current_stream());
  });
  TORCH_INTERNAL_ASSERT(started == rows.size(), "a mixture of types without a kernel");
  std::vector<float*> counts;
  counts.reserve(rows.size());
  for (const StepRow& row : rows) counts.push_back(row.step);
  launch_advance_steps(counts, arguments.found_inf, current_stream());
  views.write_back();
  bump_versions(call);
}

TORCH_LIBRARY_IMPL(APEX_GPU_LIBRARY, APEX_GPU_KEY, m) {
  m.impl("measure_gradients", &measure_gradients);
  m.impl("step_factors", &step_factors);
  m.impl("unscale_", &unscale_);
  m.impl("copy_scaled_", &copy_scaled_);
  m.impl("reconcile_masters_", &reconcile_masters_);
  m.impl("fused_step_", &fused_step_);
  m.impl("update_scale_", &update_scale_);
}

}  // namespace
}  // namespace lightning_apex
