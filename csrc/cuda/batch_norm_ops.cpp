// The batch norm operators on CUDA tensors. Nothing here waits for the device or reads its memory.
#include "host.h"  // before any formula: it says what __device__ is

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "../batch_norm_door.h"
#include "batch_norm_launchers.h"

namespace lightning_apex {
namespace {

ChannelPointer channel_pointer(const OptionalTensor& t) {
  if (!t.has_value()) return {nullptr, at::kFloat};
  return {const_cast<void*>(t->const_data_ptr()), t->scalar_type()};
}
const void* in(const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr() : nullptr; }
const double* numbers(const Tensor& t) { return t.const_data_ptr<double>(); }
double* numbers_to(const Tensor& t) { return t.mutable_data_ptr<double>(); }

// How the kernels share the tensors of a call, whose addresses are these.
BatchNormSplit split_of(const BatchNormTensors& given, std::initializer_list<const void*> addresses) {
  constexpr int kBytes = 16;
  bool aligned = true;
  for (const void* address : addresses) aligned &= reinterpret_cast<uintptr_t>(address) % kBytes == 0;
  return batch_norm_split(given.shape(), kBytes / int(given.input().element_size()), aligned);
}

// One operator's input, and what finds its moments.
class MomentsOf {
 public:
  explicit MomentsOf(const BatchNormTensors& given) {
    const void* x = given.input().const_data_ptr();
    const BatchNormSplit split = split_of(given, {x});
    const int64_t channels = given.shape().channels, size = split.parts * channels;
    memory_ = given.new_statistic(2 * size + split.parts);
    double* memory = numbers_to(memory_);
    parts_ = {memory, memory + size, memory + 2 * size, split.parts, channels};
    launch_moments(split, given.input().scalar_type(), x, parts_, current_stream());
  }
  const MomentParts& parts() const { return parts_; }

 private:
  Tensor memory_;
  MomentParts parts_;
};

std::tuple<Tensor, Tensor> stats(const Tensor& input) {
  const BatchNormTensors given("batch_norm_stats", input, input.device());
  const DeviceGuard guard(input.device());
  Tensor mean = given.new_statistic(), m2 = given.new_statistic();
  const MomentsOf found(given);
  Combination to{};
  to.mean = numbers_to(mean);
  to.m2 = numbers_to(m2);
  launch_combine(found.parts(), to, current_stream());
  return {mean, m2};
}

// Fills in all but where mean and invstd go.
Combination combination(double eps, double momentum, const OptionalTensor& running_mean,
                        const OptionalTensor& running_var) {
  Combination to{};
  to.eps = eps;
  to.momentum = momentum;
  to.running_mean = channel_pointer(running_mean);
  to.running_var = channel_pointer(running_var);
  return to;
}

std::tuple<Tensor, Tensor, Tensor> combine_ranks(const Tensor& means, const Tensor& m2s, const Tensor& counts,
                                                 double eps, double momentum, const OptionalTensor& running_mean,
                                                 const OptionalTensor& running_var) {
  constexpr const char* op = "batch_norm_combine";
  const at::Device device = means.device();
  const RankMoments ranks(op, means, m2s, counts, device);
  const int64_t channels = means.size(1);
  check_running(op, running_mean, running_var, channels, device);
  const DeviceGuard guard(device);
  Tensor mean = ranks.new_statistic(channels), invstd = ranks.new_statistic(channels), total = ranks.new_statistic(1);
  Combination to = combination(eps, momentum, running_mean, running_var);
  to.mean = numbers_to(mean);
  to.invstd = numbers_to(invstd);
  to.total_count = numbers_to(total);
  const auto pointer = [](const Tensor& t) { return const_cast<double*>(numbers(t)); };
  launch_combine({pointer(ranks.means), pointer(ranks.m2s), pointer(ranks.counts), means.size(0), channels}, to,
                 current_stream());
  bump_versions(running_mean, running_var);
  return {mean, invstd, total};
}

Tensor project(const BatchNormTensors& given, const NormPointers& norm, const OptionalTensor& z, bool relu) {
  Tensor out = given.new_output();
  const ForwardPointers s{given.input().const_data_ptr(), in(z), out.mutable_data_ptr(), relu};
  launch_project(split_of(given, {s.x, s.z, s.out}), given.input().scalar_type(), s, norm, current_stream());
  return out;
}

Tensor apply(const Tensor& input, const Tensor& mean_, const Tensor& invstd_, const OptionalTensor& weight_,
             const OptionalTensor& bias_, const OptionalTensor& z_, bool relu) {
  const BatchNormTensors given("batch_norm_apply", input, input.device());
  const DeviceGuard guard(input.device());
  const Tensor mean = given.statistic("mean", mean_), invstd = given.statistic("invstd", invstd_);
  const OptionalTensor weight = given.parameter("weight", weight_), bias = given.parameter("bias", bias_);
  const NormPointers norm{numbers(mean), numbers(invstd), channel_pointer(weight), channel_pointer(bias)};
  return project(given, norm, given.follow("z", z_), relu);
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const OptionalTensor& weight_,
                                           const OptionalTensor& bias_, const OptionalTensor& running_mean,
                                           const OptionalTensor& running_var, double eps, double momentum,
                                           const OptionalTensor& z_, bool relu) {
  constexpr const char* op = "batch_norm_forward";
  const BatchNormTensors given(op, input, input.device());
  const DeviceGuard guard(input.device());
  const OptionalTensor weight = given.parameter("weight", weight_), bias = given.parameter("bias", bias_);
  const OptionalTensor z = given.follow("z", z_);
  check_running(op, running_mean, running_var, given.shape().channels, input.device());
  Tensor mean = given.new_statistic(), invstd = given.new_statistic();
  {
    const MomentsOf found(given);
    Combination to = combination(eps, momentum, running_mean, running_var);
    to.mean = numbers_to(mean);
    to.invstd = numbers_to(invstd);
    launch_combine(found.parts(), to, current_stream());
  }
  const NormPointers norm{numbers(mean), numbers(invstd), channel_pointer(weight), channel_pointer(bias)};
  Tensor out = project(given, norm, z, relu);
  bump_versions(running_mean, running_var);
  return {out, mean, invstd};
}

// What the three operators of the backward pass share.
class Backward {
 public:
  Backward(const char* op, const Tensor& grad_out, const Tensor& input, const OptionalTensor& out, const Tensor& mean,
           const Tensor& invstd, const OptionalTensor& weight)
      : given_(op, input, input.device()),
        guard_(input.device()),
        dy_(given_.follow("grad_out", grad_out)),
        out_(given_.follow("out", out)),
        mean_(given_.statistic("mean", mean)),
        invstd_(given_.statistic("invstd", invstd)),
        weight_(given_.parameter("weight", weight)),
        streams_{dy_.const_data_ptr(), given_.input().const_data_ptr(), in(out_), nullptr, nullptr},
        norm_{numbers(mean_), numbers(invstd_), channel_pointer(weight_), channel_pointer(std::nullopt)} {}

  const BatchNormTensors& given() const { return given_; }

  std::tuple<Tensor, Tensor> sums() const {
    Tensor sum_dy = given_.new_statistic(), sum_dy_xhat = given_.new_statistic();
    const BatchNormSplit split = split_of(given_, {streams_.dy, streams_.x, streams_.out});
    const int64_t size = split.parts * given_.shape().channels;
    const Tensor parts = given_.new_statistic(2 * size);
    double* memory = numbers_to(parts);
    launch_grad_sums(split, dtype(), streams_, norm_,
                     {memory, memory + size, numbers_to(sum_dy), numbers_to(sum_dy_xhat)}, current_stream());
    return {sum_dy, sum_dy_xhat};
  }

  // grad_z: dy where relu was fused; without it, it is grad_out itself, which the caller has.
  std::tuple<Tensor, Tensor> grads(const Tensor& sum_dy, const Tensor& sum_dy_xhat, const Tensor& count,
                                   bool need_grad_z) const {
    const bool with_dz = need_grad_z && out_.has_value();
    Tensor grad_input = given_.new_output();
    Tensor grad_z = with_dz ? given_.new_output() : at::empty({0}, given_.input().options().requires_grad(false));
    BackwardPointers s = streams_;
    s.dx = grad_input.mutable_data_ptr();
    s.dz = with_dz ? grad_z.mutable_data_ptr() : nullptr;
    launch_grad(split_of(given_, {s.dy, s.x, s.out, s.dx, s.dz}), dtype(), s, norm_, numbers(sum_dy),
                numbers(sum_dy_xhat), numbers(count), current_stream());
    return {grad_input, grad_z};
  }

 private:
  at::ScalarType dtype() const { return given_.input().scalar_type(); }
  BatchNormTensors given_;
  DeviceGuard guard_;
  Tensor dy_;
  OptionalTensor out_;
  Tensor mean_, invstd_;
  OptionalTensor weight_;
  BackwardPointers streams_;
  NormPointers norm_;
};

std::tuple<Tensor, Tensor> backward_reduce(const Tensor& grad_out, const Tensor& input, const OptionalTensor& out,
                                           const Tensor& mean, const Tensor& invstd) {
  return Backward("batch_norm_backward_reduce", grad_out, input, out, mean, invstd, std::nullopt).sums();
}

std::tuple<Tensor, Tensor> backward_apply(const Tensor& grad_out, const Tensor& input, const OptionalTensor& out,
                                          const Tensor& mean, const Tensor& invstd, const OptionalTensor& weight,
                                          const Tensor& sum_dy, const Tensor& sum_dy_xhat, const Tensor& total_count,
                                          bool need_grad_z) {
  constexpr const char* op = "batch_norm_backward_apply";
  const Backward pass(op, grad_out, input, out, mean, invstd, weight);
  check_count(op, total_count, input.device());
  return pass.grads(pass.given().statistic("sum_dy", sum_dy), pass.given().statistic("sum_dy_xhat", sum_dy_xhat),
                    total_count, need_grad_z);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& input,
                                                    const OptionalTensor& out, const Tensor& mean, const Tensor& invstd,
                                                    const OptionalTensor& weight, bool need_grad_z) {
  const Backward pass("batch_norm_backward", grad_out, input, out, mean, invstd, weight);
  const auto [sum_dy, sum_dy_xhat] = pass.sums();
  const Tensor count = at::full({1}, double(pass.given().shape().per_channel()), sum_dy.options());
  const auto [grad_input, grad_z] = pass.grads(sum_dy, sum_dy_xhat, count, need_grad_z);
  return {grad_input, grad_z, sum_dy, sum_dy_xhat};
}

TORCH_LIBRARY_IMPL(APEX_GPU_LIBRARY, APEX_GPU_KEY, m) {
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_combine", &combine_ranks);
  m.impl("batch_norm_apply", &apply);
  m.impl("batch_norm_forward", &forward);
  m.impl("batch_norm_backward_reduce", &backward_reduce);
  m.impl("batch_norm_backward_apply", &backward_apply);
  m.impl("batch_norm_backward", &backward);
}

}  // namespace
}  // namespace lightning_apex
