#include "batch_norm_schemas.h"

namespace lightning_apex {

void define_batch_norm_schemas(torch::Library& m) {
  m.def("batch_norm_stats(Tensor input) -> (Tensor mean, Tensor m2)");
  m.def(
      "batch_norm_combine(Tensor means, Tensor m2s, Tensor counts, float eps, float momentum, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var) -> (Tensor mean, Tensor invstd, Tensor total_count)");
  m.def(
      "batch_norm_apply(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, Tensor? z, bool relu) "
      "-> Tensor");
  m.def(
      "batch_norm_backward_reduce(Tensor grad_out, Tensor input, Tensor? out, Tensor mean, Tensor invstd) "
      "-> (Tensor sum_dy, Tensor sum_dy_xhat)");
  m.def(
      "batch_norm_backward_apply(Tensor grad_out, Tensor input, Tensor? out, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor sum_dy, Tensor sum_dy_xhat, Tensor total_count, bool need_grad_z) "
      "-> (Tensor grad_input, Tensor grad_z)");
  m.def(
      "batch_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, float eps, float momentum, Tensor? z, bool relu) "
      "-> (Tensor out, Tensor mean, Tensor invstd)");
  m.def(
      "batch_norm_backward(Tensor grad_out, Tensor input, Tensor? out, Tensor mean, Tensor invstd, Tensor? weight, "
      "bool need_grad_z) -> (Tensor grad_input, Tensor grad_z, Tensor sum_dy, Tensor sum_dy_xhat)");
}

}  // namespace lightning_apex
