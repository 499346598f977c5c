// The door of the batch norm operators: checks before anything is written, and tensors as the kernels walk them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "batch_norm_shape.h"

namespace lightning_apex {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The tensors of one call in one dense order, that of the input where it has one: the tensors themselves or copies.
class BatchNormTensors {
 public:
  // input: (N, C, ...), of a dtype that kernels know.
  BatchNormTensors(const char* op, const Tensor& input, at::Device device);
  const Tensor& input() const { return input_; }
  const BatchNormShape& shape() const { return shape_; }
  // Another tensor of the input's shape and dtype, in its order.
  Tensor follow(const char* name, const Tensor& t) const;
  OptionalTensor follow(const char* name, const OptionalTensor& t) const;
  Tensor new_output() const;                  // in its order
  Tensor new_statistic(int64_t numel) const;  // float64
  Tensor new_statistic() const { return new_statistic(shape_.channels); }
  // A float64 tensor with one number a channel, dense.
  Tensor statistic(const char* name, const Tensor& t) const;
  // Of any floating dtype, with one number a channel, dense.
  OptionalTensor parameter(const char* name, const OptionalTensor& t) const;

 private:
  const char* op_;
  Tensor input_;
  BatchNormShape shape_;
};

// Of batch_norm_combine: [ranks, channels] twice and [ranks]; dense copies where they are not.
struct RankMoments {
  Tensor means, m2s, counts;
  RankMoments(const char* op, const Tensor& means, const Tensor& m2s, const Tensor& counts, at::Device device);
  Tensor new_statistic(int64_t numel) const;  // float64
};

// One number, float64.
void check_count(const char* op, const Tensor& count, at::Device device);
// Both or neither; each a dense floating tensor with one number a channel.
void check_running(const char* op, const OptionalTensor& mean, const OptionalTensor& var, int64_t channels,
                   at::Device device);
void bump_versions(const OptionalTensor& a, const OptionalTensor& b);

}  // namespace lightning_apex
