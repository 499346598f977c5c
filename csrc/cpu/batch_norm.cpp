// The batch norm operators on the CPU.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../batch_norm_door.h"
#include "batch_norm_engine.h"

namespace lightning_apex {

namespace {

using at::ScalarType;
const at::Device kCPU(at::kCPU);

const void* in(const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr() : nullptr; }
void* to(const OptionalTensor& t) { return t.has_value() ? t->mutable_data_ptr() : nullptr; }
const double* numbers(const Tensor& t) { return t.const_data_ptr<double>(); }
double* numbers_to(const Tensor& t) { return t.mutable_data_ptr<double>(); }

ChannelValues values(const OptionalTensor& t, double otherwise) {
  if (!t.has_value()) return {nullptr, ScalarType::Float, otherwise};
  return {const_cast<void*>(t->const_data_ptr()), t->scalar_type(), otherwise};
}

RunningStats running_stats(const OptionalTensor& mean, const OptionalTensor& var, double momentum) {
  return {{to(mean), mean.has_value() ? mean->scalar_type() : ScalarType::Float, 0},
          {to(var), var.has_value() ? var->scalar_type() : ScalarType::Float, 0},
          momentum};
}

std::tuple<Tensor, Tensor> stats(const Tensor& input) {
  const BatchNormTensors given("batch_norm_stats", input, kCPU);
  Tensor mean = given.new_statistic(), m2 = given.new_statistic();
  BatchNormEngine(given.shape(), input.scalar_type())
      .moments(given.input().const_data_ptr(), numbers_to(mean), numbers_to(m2));
  return {mean, m2};
}

std::tuple<Tensor, Tensor, Tensor> combine_ranks(const Tensor& means, const Tensor& m2s, const Tensor& counts,
                                                 double eps, double momentum, const OptionalTensor& running_mean,
                                                 const OptionalTensor& running_var) {
  constexpr const char* op = "batch_norm_combine";
  const RankMoments ranks(op, means, m2s, counts, kCPU);
  const int64_t channels = means.size(1);
  check_running(op, running_mean, running_var, channels, kCPU);
  const RunningStats running = running_stats(running_mean, running_var, momentum);
  Tensor mean = ranks.new_statistic(channels), invstd = ranks.new_statistic(channels), total = ranks.new_statistic(1);
  double count = 0;
  for (int64_t r = 0; r < means.size(0); ++r) count += numbers(ranks.counts)[r];
  *numbers_to(total) = count;
  for (int64_t c = 0; c < channels; ++c) {
    Moments all{0, 0, 0};
    for (int64_t r = 0; r < means.size(0); ++r) {
      const int64_t at = r * channels + c;
      all = combine(all, {numbers(ranks.means)[at], numbers(ranks.m2s)[at], numbers(ranks.counts)[r]});
    }
    running.see(c, all);
    numbers_to(mean)[c] = all.mean;
    numbers_to(invstd)[c] = inverse_std(all, eps);
  }
  bump_versions(running_mean, running_var);
  return {mean, invstd, total};
}

Tensor apply(const Tensor& input, const Tensor& mean_, const Tensor& invstd_, const OptionalTensor& weight_,
             const OptionalTensor& bias_, const OptionalTensor& z_, bool relu) {
  const BatchNormTensors given("batch_norm_apply", input, kCPU);
  const Tensor mean = given.statistic("mean", mean_), invstd = given.statistic("invstd", invstd_);
  const OptionalTensor weight = given.parameter("weight", weight_), bias = given.parameter("bias", bias_);
  const OptionalTensor z = given.follow("z", z_);
  Tensor out = given.new_output();
  BatchNormEngine(given.shape(), input.scalar_type())
      .project({given.input().const_data_ptr(), in(z), out.mutable_data_ptr(), relu, false}, numbers(mean),
               numbers(invstd), values(weight, 1), values(bias, 0));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const OptionalTensor& weight_,
                                           const OptionalTensor& bias_, const OptionalTensor& running_mean,
                                           const OptionalTensor& running_var, double eps, double momentum,
                                           const OptionalTensor& z_, bool relu) {
  constexpr const char* op = "batch_norm_forward";
  const BatchNormTensors given(op, input, kCPU);
  const OptionalTensor weight = given.parameter("weight", weight_), bias = given.parameter("bias", bias_);
  const OptionalTensor z = given.follow("z", z_);
  check_running(op, running_mean, running_var, given.shape().channels, kCPU);
  Tensor out = given.new_output(), mean = given.new_statistic(), invstd = given.new_statistic();
  BatchNormEngine(given.shape(), input.scalar_type())
      .forward({given.input().const_data_ptr(), in(z), out.mutable_data_ptr(), relu, false}, numbers_to(mean),
               numbers_to(invstd), values(weight, 1), values(bias, 0),
               running_stats(running_mean, running_var, momentum), eps);
  bump_versions(running_mean, running_var);
  return {out, mean, invstd};
}

std::tuple<Tensor, Tensor> backward_reduce(const Tensor& grad_out, const Tensor& input, const OptionalTensor& out_,
                                           const Tensor& mean_, const Tensor& invstd_) {
  const BatchNormTensors given("batch_norm_backward_reduce", input, kCPU);
  const Tensor dy = given.follow("grad_out", grad_out);
  const OptionalTensor out = given.follow("out", out_);
  const Tensor mean = given.statistic("mean", mean_), invstd = given.statistic("invstd", invstd_);
  Tensor sum_dy = given.new_statistic(), sum_dy_xhat = given.new_statistic();
  BatchNormEngine(given.shape(), input.scalar_type())
      .grad_sums({dy.const_data_ptr(), given.input().const_data_ptr(), in(out), nullptr, nullptr, false}, numbers(mean),
                 numbers(invstd), numbers_to(sum_dy), numbers_to(sum_dy_xhat));
  return {sum_dy, sum_dy_xhat};
}

// grad_z: dy where relu was fused; without it, it is grad_out itself, which the caller has.
Tensor new_grad_z(const BatchNormTensors& given, const OptionalTensor& out, bool needed) {
  if (needed && out.has_value()) return given.new_output();
  return at::empty({0}, given.input().options().requires_grad(false));
}

BackwardStreams backward_streams(const BatchNormTensors& given, const Tensor& dy, const OptionalTensor& out,
                                 const Tensor& grad_input, const Tensor& grad_z) {
  const bool with_dz = grad_z.dim() == given.input().dim();
  return {dy.const_data_ptr(),
          given.input().const_data_ptr(),
          in(out),
          grad_input.mutable_data_ptr(),
          with_dz ? grad_z.mutable_data_ptr() : nullptr,
          false};
}

std::tuple<Tensor, Tensor> backward_apply(const Tensor& grad_out, const Tensor& input, const OptionalTensor& out_,
                                          const Tensor& mean_, const Tensor& invstd_, const OptionalTensor& weight_,
                                          const Tensor& sum_dy_, const Tensor& sum_dy_xhat_, const Tensor& total_count,
                                          bool need_grad_z) {
  constexpr const char* op = "batch_norm_backward_apply";
  const BatchNormTensors given(op, input, kCPU);
  const Tensor dy = given.follow("grad_out", grad_out);
  const OptionalTensor out = given.follow("out", out_), weight = given.parameter("weight", weight_);
  const Tensor mean = given.statistic("mean", mean_), invstd = given.statistic("invstd", invstd_);
  const Tensor sum_dy = given.statistic("sum_dy", sum_dy_), sum_dy_xhat = given.statistic("sum_dy_xhat", sum_dy_xhat_);
  check_count(op, total_count, kCPU);
  Tensor grad_input = given.new_output(), grad_z = new_grad_z(given, out, need_grad_z);
  BatchNormEngine(given.shape(), input.scalar_type())
      .grad(backward_streams(given, dy, out, grad_input, grad_z), numbers(mean), numbers(invstd), values(weight, 1),
            numbers(sum_dy), numbers(sum_dy_xhat), *numbers(total_count));
  return {grad_input, grad_z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& input,
                                                    const OptionalTensor& out_, const Tensor& mean_,
                                                    const Tensor& invstd_, const OptionalTensor& weight_,
                                                    bool need_grad_z) {
  const BatchNormTensors given("batch_norm_backward", input, kCPU);
  const Tensor dy = given.follow("grad_out", grad_out);
  const OptionalTensor out = given.follow("out", out_), weight = given.parameter("weight", weight_);
  const Tensor mean = given.statistic("mean", mean_), invstd = given.statistic("invstd", invstd_);
  Tensor grad_input = given.new_output(), grad_z = new_grad_z(given, out, need_grad_z);
  Tensor sum_dy = given.new_statistic(), sum_dy_xhat = given.new_statistic();
  BatchNormEngine(given.shape(), input.scalar_type())
      .backward(backward_streams(given, dy, out, grad_input, grad_z), numbers(mean), numbers(invstd), values(weight, 1),
                numbers_to(sum_dy), numbers_to(sum_dy_xhat));
  return {grad_input, grad_z, sum_dy, sum_dy_xhat};
}

}  // namespace

TORCH_LIBRARY_IMPL(lightning_apex, CPU, m) {
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_combine", &combine_ranks);
  m.impl("batch_norm_apply", &apply);
  m.impl("batch_norm_forward", &forward);
  m.impl("batch_norm_backward_reduce", &backward_reduce);
  m.impl("batch_norm_backward_apply", &backward_apply);
  m.impl("batch_norm_backward", &backward);
}

}  // namespace lightning_apex
