#include "batch_norm_engine.h"

#include <algorithm>
#include <memory>

#include "backend.h"

namespace lightning_apex {

namespace {

constexpr int64_t kPiece = 4096;                       // elements of one channel whose sums share a pivot
constexpr int64_t kChannelTask = 1 << 15;              // elements: up to here channels are taken together
constexpr int64_t kRowTask = 1 << 16;                  // elements
constexpr int64_t kFewestRows = 64, kMostRows = 1024;  // whose sums share pivots
constexpr int64_t kBypassFrom = 1 << 20;  // bytes: whoever reads a smaller output next finds it in the cache
constexpr int64_t kBypassRun = 2048;      // bytes: shorter runs leave too many cache lines half written

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t pieces_of(const BatchNormShape& shape) {
  if (shape.per_channel() == 0) return 0;
  if (shape.spatial > kPiece) return shape.batch * ceil_div(shape.spatial, kPiece);
  return ceil_div(shape.batch, kPiece / shape.spatial);
}

// With fewer channels than threads can share, each is done in pieces.
bool by_channel(const BatchNormShape& shape) {
  return shape.channels >= 2 * at::get_num_threads() || shape.numel() < kChannelTask;
}

int64_t row_step(const BatchNormShape& shape) {
  return std::clamp(kRowTask / std::max<int64_t>(1, shape.channels), kFewestRows, kMostRows);
}

}  // namespace

const BatchNormKernels& batch_norm_kernels(c10::ScalarType dtype) {
#if defined(__x86_64__)
  if (&cpu_backend() == &kAvx512Backend) return batch_norm_kernels_avx512(dtype);
  if (&cpu_backend() == &kAvx2Backend) return batch_norm_kernels_avx2(dtype);
#endif
  return batch_norm_kernels_portable(dtype);
}

BatchNormEngine::BatchNormEngine(const BatchNormShape& shape, c10::ScalarType dtype)
    : shape_(shape),
      dtype_(dtype),
      kernels_(batch_norm_kernels(dtype)),
      pieces_(pieces_of(shape)),
      by_channel_(by_channel(shape)),
      plan_(plan(shape)) {}

bool BatchNormEngine::bypasses_cache(const void* out) const {
  constexpr int64_t line = 64;
  const int64_t size = int64_t(c10::elementSize(dtype_));
  if (shape_.numel() * size < kBypassFrom) return false;
  if (shape_.rows) return shape_.channels * size % line == 0 && reinterpret_cast<uintptr_t>(out) % line == 0;
  return shape_.spatial * size >= kBypassRun;
}

// ---- shares ----

TwicePlan BatchNormEngine::plan(const BatchNormShape& shape) {
  if (shape.numel() == 0) return {0, 0};
  if (shape.rows) return {ceil_div(shape.per_channel(), row_step(shape)), shape.numel()};
  if (!by_channel(shape)) return {shape.channels * pieces_of(shape), shape.numel()};
  const int64_t together = std::max<int64_t>(1, kChannelTask / shape.per_channel());
  return {ceil_div(shape.channels, together), shape.numel()};
}

Runs BatchNormEngine::piece(int64_t c, int64_t i) const {
  const int64_t start = c * shape_.spatial;
  if (shape_.spatial > kPiece) {
    const int64_t per_plane = ceil_div(shape_.spatial, kPiece), part = i % per_plane * kPiece;
    return {start + i / per_plane * plane_step() + part, 1, std::min(kPiece, shape_.spatial - part), 0};
  }
  const int64_t planes = kPiece / shape_.spatial, first = i * planes;
  return {start + first * plane_step(), std::min(planes, shape_.batch - first), shape_.spatial, plane_step()};
}

Rows BatchNormEngine::rows(int64_t i) const {
  const int64_t step = row_step(shape_), first = i * step;
  return {first, std::min(step, shape_.per_channel() - first), shape_.channels};
}

template <class Body>
void BatchNormEngine::for_channels(int64_t task, const Body& body) const {
  const int64_t together = ceil_div(shape_.channels, plan_.tasks());
  for (int64_t c = task * together; c < std::min(shape_.channels, (task + 1) * together); ++c) body(c);
}

// ---- one channel ----

Moments BatchNormEngine::channel_moments(const void* x, int64_t c) const {
  Moments all{0, 0, 0};
  for (int64_t i = 0; i < pieces_; ++i) all = combine(all, kernels_.run_moments(x, piece(c, i)));
  return all;
}

GradSums BatchNormEngine::channel_grad_sums(const BackwardStreams& s, int64_t c, double mean) const {
  GradSums all{0, 0};
  for (int64_t i = 0; i < pieces_; ++i) {
    const GradSums sums = kernels_.run_grad_sums(s, piece(c, i), mean);
    all = {all.dy + sums.dy, all.dy_x + sums.dy_x};
  }
  return all;
}

// From sums of dy and dy (x - mean), as kernels make them, to those of dy and dy xhat.
GradSums BatchNormEngine::finish(GradSums sums, double mean, double invstd) const {
  return {sums.dy, is_double() ? sum_dy_xhat<double>(sums.dy, sums.dy_x, mean, invstd)
                               : sum_dy_xhat<float>(sums.dy, sums.dy_x, mean, invstd)};
}

Projection<double> BatchNormEngine::project_by(double mean, double invstd, double weight, double bias) const {
  if (is_double()) return projection<double>(mean, invstd, weight, bias);
  const Projection<float> p = projection<float>(mean, invstd, weight, bias);
  return {p.mean, p.scale, p.shift};
}

GradProjection<double> BatchNormEngine::grad_by(double mean, double invstd, double weight, double sum_dy,
                                                double sum_dy_xhat, double count) const {
  if (is_double()) return grad_projection<double>(mean, invstd, weight, sum_dy, sum_dy_xhat, count);
  const GradProjection<float> p = grad_projection<float>(mean, invstd, weight, sum_dy, sum_dy_xhat, count);
  return {p.mean, p.by_dy, p.by_x, p.shift};
}

// ---- forward ----

void BatchNormEngine::moments(const void* x, double* mean, double* m2) {
  if (shape_.rows) return row_moments(x, mean, m2);
  const auto keep = [&](int64_t c, const Moments& m) { mean[c] = m.mean, m2[c] = m.m2; };
  if (by_channel_) {
    plan_.run([&](int64_t task, int64_t) { for_channels(task, [&](int64_t c) { keep(c, channel_moments(x, c)); }); });
  } else {
    std::vector<Moments> partial(plan_.tasks());
    plan_.run(
        [&](int64_t task, int64_t) { partial[task] = kernels_.run_moments(x, piece(task / pieces_, task % pieces_)); });
    for (int64_t c = 0; c < shape_.channels; ++c) {
      Moments all{0, 0, 0};
      for (int64_t i = 0; i < pieces_; ++i) all = combine(all, partial[c * pieces_ + i]);
      keep(c, all);
    }
  }
  if (shape_.numel() == 0) std::fill_n(mean, shape_.channels, 0.0), std::fill_n(m2, shape_.channels, 0.0);
}

void BatchNormEngine::row_moments(const void* x, double* mean, double* m2) {
  const int64_t n = shape_.channels;
  const auto means = std::make_unique_for_overwrite<double[]>(n * plan_.tasks());
  const auto m2s = std::make_unique_for_overwrite<double[]>(n * plan_.tasks());
  std::vector<ChannelArrays> scratch(plan_.workers(), {n, 3, is_double()});
  plan_.run([&](int64_t task, int64_t worker) {
    kernels_.row_moments(x, rows(task), scratch[worker].data(), &means[task * n], &m2s[task * n]);
  });
  std::fill_n(mean, n, 0.0);
  std::fill_n(m2, n, 0.0);
  double count = 0;
  for (int64_t task = 0; task < plan_.tasks(); ++task) {
    const auto more = double(rows(task).count);
    const Joint j = joint(count, more);
    const double *task_mean = &means[task * n], *task_m2 = &m2s[task * n];
    for (int64_t c = 0; c < n; ++c) {
      const Moments all = combine({mean[c], m2[c], count}, {task_mean[c], task_m2[c], more}, j);
      mean[c] = all.mean, m2[c] = all.m2;
    }
    count = j.count;
  }
}

void BatchNormEngine::project(ForwardStreams s, const double* mean, const double* invstd, const ChannelValues& weight,
                              const ChannelValues& bias) {
  s.bypass_cache = bypasses_cache(s.out);
  const auto by = [&](int64_t c) { return project_by(mean[c], invstd[c], weight[c], bias[c]); };
  if (!shape_.rows) {
    plan_.run_again([&](int64_t task, int64_t) {
      if (by_channel_)
        for_channels(task, [&](int64_t c) { kernels_.run_project(s, whole_channel(c), by(c)); });
      else
        kernels_.run_project(s, piece(task / pieces_, task % pieces_), by(task / pieces_));
    });
    return;
  }
  ChannelArrays arrays(shape_.channels, 3, is_double());
  for (int64_t c = 0; c < shape_.channels; ++c) {
    const Projection<double> p = by(c);
    arrays.set(0, c, p.mean), arrays.set(1, c, p.scale), arrays.set(2, c, p.shift);
  }
  plan_.run_again([&](int64_t task, int64_t) { kernels_.row_project(s, rows(task), arrays.data()); });
}

void BatchNormEngine::forward(ForwardStreams s, double* mean, double* invstd, const ChannelValues& weight,
                              const ChannelValues& bias, const RunningStats& running, double eps) {
  const auto see = [&](int64_t c, const Moments& m) {
    running.see(c, m);
    mean[c] = m.mean, invstd[c] = inverse_std(m, eps);
  };
  if (shape_.rows || !by_channel_ || shape_.numel() == 0) {
    moments(s.x, mean, invstd);
    for (int64_t c = 0; c < shape_.channels; ++c) see(c, {mean[c], invstd[c], double(shape_.per_channel())});
    return project(s, mean, invstd, weight, bias);
  }
  s.bypass_cache = bypasses_cache(s.out);
  plan_.run([&](int64_t task, int64_t) {
    for_channels(task, [&](int64_t c) {
      see(c, channel_moments(s.x, c));
      kernels_.run_project(s, whole_channel(c), project_by(mean[c], invstd[c], weight[c], bias[c]));
    });
  });
}

// ---- backward ----

void BatchNormEngine::grad_sums(const BackwardStreams& s, const double* mean, const double* invstd, double* sum_dy,
                                double* sum_dy_xhat) {
  if (shape_.rows) return row_grad_sums(s, mean, invstd, sum_dy, sum_dy_xhat);
  const auto keep = [&](int64_t c, const GradSums& sums) {
    const GradSums done = finish(sums, mean[c], invstd[c]);
    sum_dy[c] = done.dy, sum_dy_xhat[c] = done.dy_x;
  };
  if (by_channel_) {
    plan_.run([&](int64_t task, int64_t) {
      for_channels(task, [&](int64_t c) { keep(c, channel_grad_sums(s, c, mean[c])); });
    });
  } else {
    std::vector<GradSums> partial(plan_.tasks());
    plan_.run([&](int64_t task, int64_t) {
      const int64_t c = task / pieces_;
      partial[task] = kernels_.run_grad_sums(s, piece(c, task % pieces_), mean[c]);
    });
    for (int64_t c = 0; c < shape_.channels; ++c) {
      GradSums all{0, 0};
      for (int64_t i = 0; i < pieces_; ++i)
        all = {all.dy + partial[c * pieces_ + i].dy, all.dy_x + partial[c * pieces_ + i].dy_x};
      keep(c, all);
    }
  }
  if (shape_.numel() == 0) std::fill_n(sum_dy, shape_.channels, 0.0), std::fill_n(sum_dy_xhat, shape_.channels, 0.0);
}

void BatchNormEngine::row_grad_sums(const BackwardStreams& s, const double* mean, const double* invstd, double* sum_dy,
                                    double* sum_dy_xhat) {
  const int64_t n = shape_.channels;
  const auto dy = std::make_unique_for_overwrite<double[]>(n * plan_.tasks());
  const auto dy_x = std::make_unique_for_overwrite<double[]>(n * plan_.tasks());
  std::vector<ChannelArrays> scratch(plan_.workers(), {n, 2, is_double()});
  ChannelArrays means(n, 1, is_double());
  for (int64_t c = 0; c < n; ++c) means.set(0, c, mean[c]);
  plan_.run([&](int64_t task, int64_t worker) {
    kernels_.row_grad_sums(s, rows(task), means.data(), scratch[worker].data(), &dy[task * n], &dy_x[task * n]);
  });
  std::fill_n(sum_dy, n, 0.0);
  std::fill_n(sum_dy_xhat, n, 0.0);
  for (int64_t task = 0; task < plan_.tasks(); ++task)
    for (int64_t c = 0; c < n; ++c) sum_dy[c] += dy[task * n + c], sum_dy_xhat[c] += dy_x[task * n + c];
  for (int64_t c = 0; c < n; ++c) sum_dy_xhat[c] = finish({sum_dy[c], sum_dy_xhat[c]}, mean[c], invstd[c]).dy_x;
}

void BatchNormEngine::grad(BackwardStreams s, const double* mean, const double* invstd, const ChannelValues& weight,
                           const double* sum_dy, const double* sum_dy_xhat, double count) {
  s.bypass_cache = bypasses_cache(s.dx);
  const auto by = [&](int64_t c) { return grad_by(mean[c], invstd[c], weight[c], sum_dy[c], sum_dy_xhat[c], count); };
  if (!shape_.rows) {
    plan_.run_again([&](int64_t task, int64_t) {
      if (by_channel_)
        for_channels(task, [&](int64_t c) { kernels_.run_grad(s, whole_channel(c), by(c)); });
      else
        kernels_.run_grad(s, piece(task / pieces_, task % pieces_), by(task / pieces_));
    });
    return;
  }
  ChannelArrays arrays(shape_.channels, 4, is_double());
  for (int64_t c = 0; c < shape_.channels; ++c) {
    const GradProjection<double> p = by(c);
    arrays.set(0, c, p.mean), arrays.set(1, c, p.by_dy), arrays.set(2, c, p.by_x), arrays.set(3, c, p.shift);
  }
  plan_.run_again([&](int64_t task, int64_t) { kernels_.row_grad(s, rows(task), arrays.data()); });
}

void BatchNormEngine::backward(BackwardStreams s, const double* mean, const double* invstd, const ChannelValues& weight,
                               double* sum_dy, double* sum_dy_xhat) {
  const auto count = double(shape_.per_channel());
  if (shape_.rows || !by_channel_ || shape_.numel() == 0) {
    grad_sums(s, mean, invstd, sum_dy, sum_dy_xhat);
    return grad(s, mean, invstd, weight, sum_dy, sum_dy_xhat, count);
  }
  s.bypass_cache = bypasses_cache(s.dx);
  plan_.run([&](int64_t task, int64_t) {
    for_channels(task, [&](int64_t c) {
      const GradSums sums = finish(channel_grad_sums(s, c, mean[c]), mean[c], invstd[c]);
      sum_dy[c] = sums.dy, sum_dy_xhat[c] = sums.dy_x;
      const auto by = grad_by(mean[c], invstd[c], weight[c], sums.dy, sums.dy_x, count);
      kernels_.run_grad(s, whole_channel(c), by);
    });
  });
}

}  // namespace lightning_apex
