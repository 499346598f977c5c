// The operators on gradients, masters and the loss scale, on the CPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "../formulas/loss_scale.h"
#include "../tensor_lists.h"
#include "backend.h"
#include "parallel.h"

namespace lightning_apex {

namespace {

const at::Device kCPU(at::kCPU);

float value_or(const OptionalTensor& t, float otherwise) {
  return t.has_value() ? *t->const_data_ptr<float>() : otherwise;
}

template <class T>
Tensor scalar(T value) {
  Tensor t = at::empty({}, at::dtype(c10::CppTypeToScalarType<T>::value));
  *t.mutable_data_ptr<T>() = value;
  return t;
}

// One uint8 for each row: whether any of its chunks is marked. Sets found_inf if any row is.
Tensor nonfinite_rows(size_t rows, const ChunkPlan& plan, const std::vector<char>& marks,
                      const OptionalTensor& found_inf) {
  Tensor flags = at::empty({static_cast<int64_t>(rows)}, at::kByte);
  auto* flag = flags.mutable_data_ptr<uint8_t>();
  std::fill_n(flag, rows, uint8_t(0));
  bool any = false;
  for (size_t i = 0; i < marks.size(); ++i) {
    flag[plan.chunks()[i].row] |= marks[i];
    any |= marks[i] != 0;
  }
  if (any && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1;
  return flags;
}

// Reads every row once: the sum of squares of all, and which chunks hold a non-finite element.
double measure_rows(const std::vector<CopyRow>& rows, ChunkPlan& plan, std::vector<char>& marks) {
  const Backend& backend = cpu_backend();
  for (const CopyRow& row : rows) plan.add(row.numel);
  std::vector<double> sums(plan.chunks().size());
  marks.assign(plan.chunks().size(), 0);
  plan.run([&](size_t i, const Chunk& chunk) {
    const CopyRow& row = rows[chunk.row];
    const Measured m = backend.measure(row.src_dtype)(row.src, chunk.begin, chunk.end);
    sums[i] = m.sum_of_squares;
    marks[i] = m.nonfinite;
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

void copy_all(const std::vector<CopyRow>& rows, float multiplier, ChunkPlan& plan, std::vector<char>& marks) {
  const Backend& backend = cpu_backend();
  for (const CopyRow& row : rows) plan.add(row.numel);
  marks.assign(plan.chunks().size(), 0);
  plan.run([&](size_t i, const Chunk& chunk) {
    const CopyRow& row = rows[chunk.row];
    marks[i] = backend.copy(row.dst_dtype, row.src_dtype)(row.dst, row.src, multiplier, chunk.begin, chunk.end);
  });
}

std::tuple<Tensor, Tensor> measure_gradients(TensorList grads) {
  check_list("measure_gradients", "grads", grads, kCPU);
  FlatViews views;
  ChunkPlan plan(grads.size());
  std::vector<char> marks;
  const double sum = measure_rows(single_rows(grads, Access::read, views), plan, marks);
  return {scalar(sum), nonfinite_rows(grads.size(), plan, marks, std::nullopt)};
}

Tensor tensor_norms(TensorList tensors, double ord) {
  const bool maxima = is_max_norm(ord);
  check_list("tensor_norms", "tensors", tensors, kCPU);
  FlatViews views;
  const std::vector<CopyRow> rows = single_rows(tensors, Access::read, views);
  const Backend& backend = cpu_backend();
  ChunkPlan plan(rows.size());
  for (const CopyRow& row : rows) plan.add(row.numel);
  std::vector<double> of_chunks(plan.chunks().size());
  plan.run([&](size_t i, const Chunk& chunk) {
    const CopyRow& row = rows[chunk.row];
    of_chunks[i] = maxima ? backend.magnitude(row.src_dtype)(row.src, chunk.begin, chunk.end)
                          : backend.measure(row.src_dtype)(row.src, chunk.begin, chunk.end).sum_of_squares;
  });
  Tensor norms = at::zeros({int64_t(rows.size())}, at::kDouble);
  auto* norm = norms.mutable_data_ptr<double>();
  for (size_t i = 0; i < of_chunks.size(); ++i) {
    double& of_row = norm[plan.chunks()[i].row];
    of_row = maxima ? larger(of_row, of_chunks[i]) : of_row + of_chunks[i];
  }
  return norms;
}

std::tuple<Tensor, Tensor> step_factors_op(const Tensor& sum_of_squares, const Tensor& nonfinite,
                                           const OptionalTensor& scale, double max_norm, const Tensor& found_inf) {
  constexpr const char* op = "step_factors";
  check_value(op, "sum_of_squares", sum_of_squares, at::kDouble, 1, kCPU);
  check_value(op, "nonfinite", nonfinite, at::kByte, nonfinite.numel(), kCPU);
  check_value(op, "scale", scale, at::kFloat, 1, kCPU);
  check_value(op, "found_inf", found_inf, at::kFloat, 1, kCPU);
  const auto* flags = nonfinite.const_data_ptr<uint8_t>();
  bool any = false;
  for (int64_t i = 0; i < nonfinite.numel(); ++i) any |= flags[i] != 0;
  if (any) {
    *found_inf.mutable_data_ptr<float>() = 1;
    bump_versions(found_inf);
  }
  const StepFactors f = step_factors(*sum_of_squares.const_data_ptr<double>(), value_or(scale, 1), max_norm);
  return {scalar(f.norm), scalar(f.multiplier)};
}

Tensor unscale_(TensorList grads, const Tensor& multiplier, const OptionalTensor& found_inf) {
  constexpr const char* op = "unscale_";
  check_value(op, "multiplier", multiplier, at::kFloat, 1, kCPU);
  check_value(op, "found_inf", found_inf, at::kFloat, 1, kCPU);
  check_list(op, "grads", grads, kCPU);
  check_no_overlap(op, "grads", grads);
  const float factor = *multiplier.const_data_ptr<float>();
  FlatViews views;
  ChunkPlan plan(grads.size());
  std::vector<char> marks;
  if (factor == 1) {
    measure_rows(single_rows(grads, Access::read, views), plan, marks);
  } else {
    copy_all(single_rows(grads, Access::read_write, views), factor, plan, marks);
    views.write_back();
    bump_versions(grads);
  }
  return nonfinite_rows(grads.size(), plan, marks, found_inf);
}

Tensor copy_scaled_(TensorList dst, TensorList src, const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  check_copy(dst, src, multiplier, found_inf, kCPU);
  FlatViews views;
  ChunkPlan plan(dst.size());
  std::vector<char> marks;
  copy_all(copy_rows(dst, src, views), value_or(multiplier, 1), plan, marks);
  views.write_back();
  bump_versions(dst);
  return nonfinite_rows(dst.size(), plan, marks, found_inf);
}

void reconcile_masters_(TensorList masters, TensorList params) {
  check_reconcile(masters, params, kCPU);
  FlatViews views;
  ChunkPlan plan(params.size());
  const std::vector<CopyRow> rows = reconcile_rows(masters, params, views);
  const Backend& backend = cpu_backend();
  for (const CopyRow& row : rows) plan.add(row.numel);
  plan.run([&](size_t, const Chunk& chunk) {
    const CopyRow& row = rows[chunk.row];
    backend.reconcile(row.src_dtype)(row.dst, row.src, chunk.begin, chunk.end);
  });
  views.write_back();
  bump_versions(masters);
}

void update_scale_(const Tensor& scale, const Tensor& trackers, const Tensor& found_inf, double growth_factor,
                   double backoff_factor, int64_t growth_interval, int64_t hysteresis, double min_scale,
                   double max_scale) {
  constexpr const char* op = "update_scale_";
  check_value(op, "scale", scale, at::kFloat, 1, kCPU);
  check_value(op, "trackers", trackers, at::kInt, 4, kCPU);
  check_value(op, "found_inf", found_inf, at::kFloat, 1, kCPU);
  auto* value = scale.mutable_data_ptr<float>();
  auto* tracker = trackers.mutable_data_ptr<int>();
  const ScaleRule rule{float(growth_factor), float(backoff_factor), int(growth_interval),
                       int(hysteresis),      float(min_scale),      float(max_scale)};
  const ScaleState now{*value, tracker[0], tracker[1], tracker[2], tracker[3]};
  const ScaleState next = next_scale(now, *found_inf.const_data_ptr<float>() != 0, rule);
  *value = next.scale;
  tracker[0] = next.growth_tracker;
  tracker[1] = next.hysteresis_tracker;
  tracker[2] = next.consecutive_skips;
  tracker[3] = next.skipped_steps;
  bump_versions({scale, trackers});
}

}  // namespace

TORCH_LIBRARY_IMPL(lightning_apex, CPU, m) {
  m.impl("measure_gradients", &measure_gradients);
  m.impl("tensor_norms", &tensor_norms);
  m.impl("step_factors", &step_factors_op);
  m.impl("unscale_", &unscale_);
  m.impl("copy_scaled_", &copy_scaled_);
  m.impl("reconcile_masters_", &reconcile_masters_);
  m.impl("update_scale_", &update_scale_);
}

}  // namespace lightning_apex
