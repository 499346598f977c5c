#include "schemas.h"

#include <ATen/ops/zeros.h>

#include <string_view>
#include <utility>

#include "batch_norm_schemas.h"
#include "step_call.h"

namespace lightning_apex {

void define_schemas(torch::Library& m) {
  m.def("measure_gradients(Tensor[] grads) -> (Tensor sum_of_squares, Tensor nonfinite)");
  m.def(
      "step_factors(Tensor sum_of_squares, Tensor nonfinite, Tensor? scale, float max_norm, Tensor(a!) found_inf) "
      "-> (Tensor norm, Tensor multiplier)");
  m.def("unscale_(Tensor(a!)[] grads, Tensor multiplier, Tensor(b!)? found_inf) -> Tensor nonfinite");
  m.def("copy_scaled_(Tensor(a!)[] dst, Tensor[] src, Tensor? multiplier, Tensor(b!)? found_inf) -> Tensor nonfinite");
  m.def("reconcile_masters_(Tensor(a!)[] masters, Tensor[] params) -> ()");
  m.def(
      "fused_step_(str name, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] masters, Tensor(c!)[] states, "
      "Tensor(d!)[] steps, float[] hypers, Tensor? lr, Tensor? multiplier, Tensor? found_inf, Tensor? norms) -> ()");
  m.def(
      "fused_norms_(str name, Tensor[] params, Tensor[] grads, Tensor[] masters, Tensor(a!)[] states, Tensor[] steps, "
      "float[] hypers, Tensor? lr, Tensor? multiplier, Tensor? found_inf) -> Tensor norms");
  m.def("tensor_norms(Tensor[] tensors, float ord) -> Tensor");
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) trackers, Tensor found_inf, float growth_factor, "
      "float backoff_factor, int growth_interval, int hysteresis, float min_scale, float max_scale) -> ()");
  define_batch_norm_schemas(m);
}

namespace {

// Sparse tensors, too, end up here: the dispatcher counts them as another kind of device.
void expect_no_tensors(const char* op, const char* name, TensorList list) {
  if (list.empty()) return;
  check_list(op, name, list, list[0].device());
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": this build of lightning_apex has no kernels for tensors on ",
                              list[0].device(), "; build_info() tells what it was built for");
}

std::tuple<Tensor, Tensor> measure_gradients(TensorList grads) {
  expect_no_tensors("measure_gradients", "grads", grads);
  return {at::zeros({}, at::kDouble), at::zeros({0}, at::kByte)};
}

Tensor copy_scaled_(TensorList dst, TensorList src, const OptionalTensor&, const OptionalTensor&) {
  expect_no_tensors("copy_scaled_", "src", src);
  expect_no_tensors("copy_scaled_", "dst", dst);
  return at::zeros({0}, at::kByte);
}

Tensor unscale_(TensorList grads, const Tensor& multiplier, const OptionalTensor&) {
  expect_no_tensors("unscale_", "grads", grads);
  expect_no_tensors("unscale_", "multiplier", multiplier);
  return at::zeros({0}, at::kByte);
}

void reconcile_masters_(TensorList masters, TensorList params) {
  expect_no_tensors("reconcile_masters_", "params", params);
  expect_no_tensors("reconcile_masters_", "masters", masters);
}

void expect_no_step(const StepCall& call) {
  const std::pair<const char*, TensorList> lists[] = {{"grads", call.grads},
                                                      {"params", call.params},
                                                      {"masters", call.masters},
                                                      {"states", call.states},
                                                      {"steps", call.steps}};
  for (const auto& [name, list] : lists) expect_no_tensors(call.op(), name, list);
}

void fused_step_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                 TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                 const OptionalTensor& multiplier, const OptionalTensor& found_inf, const OptionalTensor& norms) {
  expect_no_step({Passes::all, name, params, grads, masters, states, steps, hypers, lr, multiplier, found_inf, norms});
}

Tensor fused_norms_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                    TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                    const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  const OptionalTensor none;
  const StepCall call{Passes::first, name,   params, grads,      masters,   states,
                      steps,         hypers, lr,     multiplier, found_inf, none};
  expect_no_step(call);
  return at::zeros({0, n_norms(call)}, at::kDouble);
}

Tensor tensor_norms(TensorList tensors, double ord) {
  is_max_norm(ord);
  expect_no_tensors("tensor_norms", "tensors", tensors);
  return at::zeros({0}, at::kDouble);
}

}  // namespace

void implement_calls_without_tensors(torch::Library& m) {
  m.impl("measure_gradients", &measure_gradients);
  m.impl("copy_scaled_", &copy_scaled_);
  m.impl("unscale_", &unscale_);
  m.impl("reconcile_masters_", &reconcile_masters_);
  m.impl("fused_step_", &fused_step_);
  m.impl("fused_norms_", &fused_norms_);
  m.impl("tensor_norms", &tensor_norms);
}

}  // namespace lightning_apex
