// Batch norm over whole tensors on the CPU: which thread computes what, and in which order partial results are
// combined. Neither the order nor the shares depend on the number of threads. Raw pointers only.
#pragma once

#include "../batch_norm_shape.h"
#include "batch_norm_backend.h"
#include "batch_norm_tasks.h"
#include "batch_norm_values.h"

namespace lightning_apex {

class BatchNormEngine {
 public:
  BatchNormEngine(const BatchNormShape& shape, c10::ScalarType dtype);

  void moments(const void* x, double* mean, double* m2);
  void project(ForwardStreams s, const double* mean, const double* invstd, const ChannelValues& weight,
               const ChannelValues& bias);
  // Both at once; writes mean and invstd.
  void forward(ForwardStreams s, double* mean, double* invstd, const ChannelValues& weight, const ChannelValues& bias,
               const RunningStats& running, double eps);

  void grad_sums(const BackwardStreams& s, const double* mean, const double* invstd, double* sum_dy,
                 double* sum_dy_xhat);
  void grad(BackwardStreams s, const double* mean, const double* invstd, const ChannelValues& weight,
            const double* sum_dy, const double* sum_dy_xhat, double count);
  // Both at once.
  void backward(BackwardStreams s, const double* mean, const double* invstd, const ChannelValues& weight,
                double* sum_dy, double* sum_dy_xhat);

 private:
  bool is_double() const { return dtype_ == c10::ScalarType::Double; }
  bool bypasses_cache(const void* out) const;

  // Shares of the work. Rows: a task is some rows. Otherwise it is a few channels, or a piece of one.
  static TwicePlan plan(const BatchNormShape& shape);
  int64_t plane_step() const { return shape_.channels * shape_.spatial; }
  Runs whole_channel(int64_t c) const { return {c * shape_.spatial, shape_.batch, shape_.spatial, plane_step()}; }
  Runs piece(int64_t c, int64_t i) const;
  Rows rows(int64_t i) const;
  template <class Body>
  void for_channels(int64_t task, const Body& body) const;

  Moments channel_moments(const void* x, int64_t c) const;
  GradSums channel_grad_sums(const BackwardStreams& s, int64_t c, double mean) const;
  GradSums finish(GradSums sums, double mean, double invstd) const;
  Projection<double> project_by(double mean, double invstd, double weight, double bias) const;
  GradProjection<double> grad_by(double mean, double invstd, double weight, double sum_dy, double sum_dy_xhat,
                                 double count) const;
  void row_moments(const void* x, double* mean, double* m2);
  void row_grad_sums(const BackwardStreams& s, const double* mean, const double* invstd, double* sum_dy,
                     double* sum_dy_xhat);

  BatchNormShape shape_;
  c10::ScalarType dtype_;
  const BatchNormKernels& kernels_;
  int64_t pieces_;  // of each channel
  bool by_channel_;
  TwicePlan plan_;
};

}  // namespace lightning_apex
