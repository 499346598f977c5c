// The operators on CUDA tensors. Nothing here waits for the device or reads its memory: what is decided by a value on
// the device (a multiplier, found_inf, a step count) is decided by the kernels.
#include "host.h"  // before any formula: it says what __device__ is

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "../optimizer_table.h"
#include "../step_call.h"
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

Tables tables_of(at::Device device) { return Tables(device.index(), current_stream()); }

std::tuple<Tensor, Tensor> measure_gradients(TensorList grads) {
  const at::Device device = device_of(grads);
  check_list("measure_gradients", "grads", grads, device);
  const DeviceGuard guard(device);
  FlatViews views;
  const auto rows = single_rows(grads, Access::read, views);
  int64_t n_partials = 0;
  for (const CopyRow& row : rows) n_partials += chunks_of(row.numel, chunk_size(kNormChunk), false);

  Tensor sum_of_squares = at::empty({}, on(device, at::kDouble));
  Tensor nonfinite = at::zeros({int64_t(grads.size())}, on(device, at::kByte));
  const Tensor partials = at::empty({n_partials}, on(device, at::kDouble));
  Tables tables = tables_of(device);
  launch_measure(rows, partials.mutable_data_ptr<double>(), n_partials, sum_of_squares.mutable_data_ptr<double>(),
                 nonfinite.mutable_data_ptr<uint8_t>(), tables);
  return {sum_of_squares, nonfinite};
}

Tensor tensor_norms(TensorList tensors, double ord) {
  const bool maxima = is_max_norm(ord);
  const at::Device device = device_of(tensors);
  check_list("tensor_norms", "tensors", tensors, device);
  const DeviceGuard guard(device);
  FlatViews views;
  const auto rows = single_rows(tensors, Access::read, views);
  int64_t n_partials = 0;
  for (const CopyRow& row : rows) n_partials += chunks_of(row.numel, chunk_size(kNormChunk), true);
  Tensor norms = at::empty({int64_t(tensors.size())}, on(device, at::kDouble));
  const Tensor partials = at::empty({n_partials}, on(device, at::kDouble));
  Tables tables = tables_of(device);
  launch_tensor_norms(rows, maxima, partials.mutable_data_ptr<double>(), norms.mutable_data_ptr<double>(), tables);
  return norms;
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
  Tables tables = tables_of(device);
  launch_copy_scaled(rows, read_pointer(multiplier), nonfinite.mutable_data_ptr<uint8_t>(), write_pointer(found_inf),
                     tables);
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
  Tables tables = tables_of(device);
  launch_reconcile(reconcile_rows(masters, params, views), tables);
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

// Makes what passes the call asks for, one launch each for every mixture of types.
void make_passes(const StepCall& call, int optimizer, const std::vector<StepRow>& rows, double* norms,
                 at::Device device) {
  StepArguments arguments = step_arguments(call);
  arguments.norms = norms;
  const bool with_norms = norms != nullptr, measures = with_norms && !call.norms.has_value();
  Tensor partials;
  if (measures) {
    int64_t chunks = 0;
    for (const StepRow& row : rows) chunks += chunks_of(row.numel, chunk_size(kStepChunk), true);
    partials = at::empty({chunks, n_norms(call)}, on(device, at::kDouble));
  }
  Tables tables = tables_of(device);
  std::vector<StepKind> made;
  for (size_t i = 0; i < rows.size(); ++i) {
    const StepKind kind = kind_of(rows[i]);
    if (std::find(made.rbegin(), made.rend(), kind) != made.rend()) continue;
    made.push_back(kind);
    const StepPasses passes{int(i), measures ? partials.mutable_data_ptr<double>() : nullptr,
                            call.passes != Passes::first};
    bool known = false;
    for_each_type([&](auto tag) {
      using P = typename decltype(tag)::type;
      if (kind.param != dtype_of<P>) return;
      known = with_norms ? launch_step<P, true>(optimizer, rows, arguments, passes, tables)
                         : launch_step<P, false>(optimizer, rows, arguments, passes, tables);
    });
    TORCH_INTERNAL_ASSERT(known, "a mixture of types without a kernel");
  }
}

void fused_step_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                 TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                 const OptionalTensor& multiplier, const OptionalTensor& found_inf, const OptionalTensor& norms) {
  const StepCall call{Passes::all, name,   params, grads,      masters,   states,
                      steps,       hypers, lr,     multiplier, found_inf, norms};
  const at::Device device = device_of(params);
  const int optimizer = check_step(call, device);
  const DeviceGuard guard(device);
  Tensor measured;
  if (norms.has_value())
    measured = *norms;
  else if (optimizer_table()[optimizer].n_norms > 0)
    measured = at::empty({int64_t(params.size()), n_norms(call)}, on(device, at::kDouble));
  double* all = measured.defined() ? static_cast<double*>(const_cast<void*>(measured.const_data_ptr())) : nullptr;
  FlatViews views;
  make_passes(call, optimizer, step_rows(call, views, all), all, device);
  views.write_back();
  bump_versions(call);
}

Tensor fused_norms_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                    TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                    const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  const OptionalTensor none;
  const StepCall call{Passes::first, name,   params, grads,      masters,   states,
                      steps,         hypers, lr,     multiplier, found_inf, none};
  const at::Device device = device_of(params);
  const int optimizer = check_step(call, device);
  const DeviceGuard guard(device);
  Tensor norms = at::empty({int64_t(params.size()), n_norms(call)}, on(device, at::kDouble));
  FlatViews views;
  double* all = norms.mutable_data_ptr<double>();
  make_passes(call, optimizer, step_rows(call, views, all), all, device);
  views.write_back();
  bump_versions(call);
  return norms;
}

TORCH_LIBRARY_IMPL(APEX_GPU_LIBRARY, APEX_GPU_KEY, m) {
  m.impl("measure_gradients", &measure_gradients);
  m.impl("step_factors", &step_factors);
  m.impl("unscale_", &unscale_);
  m.impl("copy_scaled_", &copy_scaled_);
  m.impl("reconcile_masters_", &reconcile_masters_);
  m.impl("fused_step_", &fused_step_);
  m.impl("fused_norms_", &fused_norms_);
  m.impl("tensor_norms", &tensor_norms);
  m.impl("update_scale_", &update_scale_);
}

}  // namespace
}  // namespace lightning_apex
