// What the batch norm engine sees of its kernels: one table of functions for each instruction set and element type.
//
// "Compute type": double for double, float for all others. Whatever is passed as double here is exact in it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../formulas/batch_norm.h"

namespace lightning_apex {

// Part of one channel in [batch, channels, spatial]: `count` runs of `size` elements, their starts `stride` apart.
struct Runs {
  int64_t first, count, size, stride;
  int64_t numel() const { return count * size; }
};

// Part of [rows, channels].
struct Rows {
  int64_t first, count, channels;
};

// Numbers of the compute type, one a channel, in arrays padded to whole blocks (kPad) of readable memory.
constexpr int64_t kPad = 32;

struct GradSums {
  double dy, dy_x;  // the sums of dy and of dy (x - mean)
};

// Null where an operator has no such tensor. All of one element type, in one order.
struct ForwardStreams {
  const void *x, *z;
  void* out;
  bool relu, bypass_cache;  // of the output's stores
};
struct BackwardStreams {
  const void *dy, *x, *out;  // out: where it is not positive, dy counts as 0
  void *dx, *dz;
  bool bypass_cache;
};

struct BatchNormKernels {
  Moments (*run_moments)(const void* x, const Runs& runs);
  void (*run_project)(const ForwardStreams& s, const Runs& runs, const Projection<double>& p);
  GradSums (*run_grad_sums)(const BackwardStreams& s, const Runs& runs, double mean);
  void (*run_grad)(const BackwardStreams& s, const Runs& runs, const GradProjection<double>& p);

  // scratch: 3 padded arrays. Writes means and sums of squared deviations, one a channel.
  void (*row_moments)(const void* x, const Rows& rows, void* scratch, double* mean, double* m2);
  // Arrays of the compute type, one after another: mean, scale, shift.
  void (*row_project)(const ForwardStreams& s, const Rows& rows, const void* projection);
  // scratch: 2 padded arrays. Writes sums, one a channel.
  void (*row_grad_sums)(const BackwardStreams& s, const Rows& rows, const void* mean, void* scratch, double* sum_dy,
                        double* sum_dy_x);
  // mean, by_dy, by_x, shift
  void (*row_grad)(const BackwardStreams& s, const Rows& rows, const void* projection);
};

// Those of the chosen CPU backend (see backend.h).
const BatchNormKernels& batch_norm_kernels(c10::ScalarType dtype);

using PickBatchNormKernels = const BatchNormKernels& (*)(c10::ScalarType dtype);
#if defined(__x86_64__)
const BatchNormKernels& batch_norm_kernels_avx512(c10::ScalarType dtype);
const BatchNormKernels& batch_norm_kernels_avx2(c10::ScalarType dtype);
#endif
const BatchNormKernels& batch_norm_kernels_portable(c10::ScalarType dtype);

}  // namespace lightning_apex
