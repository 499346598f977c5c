// What the host file of batch norm asks of its kernel files: raw pointers, sizes and dtypes, as in launchers.h.
#pragma once

#include "../batch_norm_shape.h"
#include "device.h"

namespace lightning_apex {

// How a tensor is shared out among blocks, by its shape alone: so that sums are taken in the same order everywhere.
//   planes  a block has `span` vectors of one channel
//   rows    a block has `span` rows of `at_once` vectors, one below the other for each of its threads
struct BatchNormSplit {
  BatchNormShape shape;
  int width;  // of a vector, in elements
  int at_once;
  int64_t span, parts, tiles;  // rows: tiles side by side; planes: one for each channel
  int64_t blocks() const { return parts * tiles; }
};
// aligned: whether all addresses allow vectors of `width` elements.
BatchNormSplit batch_norm_split(const BatchNormShape& shape, int width, bool aligned);

// One number a channel, of any floating dtype.
struct ChannelPointer {
  void* data;  // nullptr: there is none
  c10::ScalarType dtype;
};

// All that several parts or ranks found: [parts, channels] twice, and [parts].
struct MomentParts {
  double *means, *m2s, *counts;
  int64_t parts, channels;
};
struct Combination {
  double* mean;
  double *m2, *invstd;  // one of them
  double* total_count;  // or nullptr
  double eps, momentum;
  ChannelPointer running_mean, running_var;
};

struct ForwardPointers {
  const void *x, *z;
  void* out;
  bool relu;
};
struct BackwardPointers {
  const void *dy, *x, *out;  // out: where it is not positive, dy counts as 0; or nullptr
  void *dx, *dz;
};
struct NormPointers {
  const double *mean, *invstd;
  ChannelPointer weight, bias;
};
// Sums of dy and of dy (x - mean) by parts, [parts, channels]; and what becomes of them.
struct GradSumPointers {
  double *dy_parts, *dy_x_parts;
  double *dy, *dy_xhat;
};

void launch_moments(const BatchNormSplit& split, c10::ScalarType dtype, const void* x, const MomentParts& parts,
                    Stream stream);
void launch_combine(const MomentParts& parts, const Combination& to, Stream stream);
void launch_project(const BatchNormSplit& split, c10::ScalarType dtype, const ForwardPointers& s,
                    const NormPointers& norm, Stream stream);
void launch_grad_sums(const BatchNormSplit& split, c10::ScalarType dtype, const BackwardPointers& s,
                      const NormPointers& norm, const GradSumPointers& sums, Stream stream);
void launch_grad(const BatchNormSplit& split, c10::ScalarType dtype, const BackwardPointers& s,
                 const NormPointers& norm, const double* sum_dy, const double* sum_dy_xhat, const double* count,
                 Stream stream);

}  // namespace lightning_apex
