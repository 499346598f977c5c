#include "schemas.h"

#include <ATen/ops/zeros.h>

#include "tensor_lists.h"

namespace lightning_apex {

void define_schemas(torch::Library& m) {
  m.def("measure_gradients(Tensor[] grads) -> (Tensor sum_of_squares, Tensor nonfinite)");
  m.def(
      "step_factors(Tensor sum_of_squares, Tensor nonfinite, Tensor? scale, float max_norm, Tensor(a!) found_inf) "
      "-> (Tensor norm, Tensor multiplier)");
  m.def("unscale_(Tensor(a!)[] grads, Tensor multiplier, Tensor(b!)? found_inf) -> Tensor nonfinite");
  m.def(
      "copy_scaled_(Tensor(a!)[] dst, Tensor[] src, Tensor? multiplier, Tensor(b!)? found_inf) -> Tensor nonfinite");
  m.def("reconcile_masters_(Tensor(a!)[] masters, Tensor[] params) -> ()");
  m.def(
      "fused_step_(str name, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] masters, Tensor(c!)[] states, "
      "Tensor(d!)[] steps, float[] hypers, Tensor? lr, Tensor? multiplier, Tensor? found_inf) -> ()");
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) trackers, Tensor found_inf, float growth_factor, "
      "float backoff_factor, int growth_interval, int hysteresis, float min_scale, float max_scale) -> ()");
}

namespace {

void expect_no_tensors(const char* op, TensorList list) {
  TORCH_CHECK_NOT_IMPLEMENTED(list.empty(), op, ": this build of lightning_apex has no kernels for tensors on ",
                              list[0].device(), "; build_info() tells what it was built for");
}

std::tuple<Tensor, Tensor> measure_gradients(TensorList grads) {
  expect_no_tensors("measure_gradients", grads);
  return {at::zeros({}, at::kDouble), at::zeros({0}, at::kByte)};
}

Tensor copy_scaled_(TensorList dst, TensorList src, const OptionalTensor&, const OptionalTensor&) {
  expect_no_tensors("copy_scaled_", dst.empty() ? src : dst);
  return at::zeros({0}, at::kByte);
}

Tensor unscale_(TensorList grads, const Tensor& multiplier, const OptionalTensor&) {
  expect_no_tensors("unscale_", grads.empty() ? TensorList(multiplier) : grads);
  return at::zeros({0}, at::kByte);
}

void reconcile_masters_(TensorList masters, TensorList params) {
  expect_no_tensors("reconcile_masters_", masters.empty() ? params : masters);
}

void fused_step_(std::string_view, TensorList params, TensorList grads, TensorList, TensorList states, TensorList steps,
                 at::ArrayRef<double>, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  for (const TensorList list : {params, grads, states, steps}) expect_no_tensors("fused_step_", list);
}

}  // namespace

void implement_calls_without_tensors(torch::Library& m) {
  m.impl("measure_gradients", &measure_gradients);
  m.impl("copy_scaled_", &copy_scaled_);
  m.impl("unscale_", &unscale_);
  m.impl("reconcile_masters_", &reconcile_masters_);
  m.impl("fused_step_", &fused_step_);
}

}  // namespace lightning_apex
