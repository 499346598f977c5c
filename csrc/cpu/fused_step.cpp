// fused_step_ and fused_norms_ on the CPU.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <utility>

#include "../optimizer_table.h"
#include "../step_call.h"
#include "backend.h"
#include "parallel.h"
#include "two_passes.h"

namespace lightning_apex {

namespace {

double read_number(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return *t.const_data_ptr<double>();
    case ScalarType::Half:
      return *t.const_data_ptr<at::Half>();
    case ScalarType::BFloat16:
      return *t.const_data_ptr<at::BFloat16>();
    default:
      return *t.const_data_ptr<float>();
  }
}

bool is_skipped(const StepCall& call) {
  return call.found_inf.has_value() && *call.found_inf->const_data_ptr<float>() != 0;
}

void only_pass(const StepWork& work) {
  ChunkPlan plan(work.rows.size());
  for (const StepRow& row : work.rows) plan.add(row.numel);
  plan.run([&](size_t, const Chunk& chunk) {
    const Recipe& recipe = work.recipe(chunk.row);
    recipe.update(work.rows[chunk.row], recipe.consts.bytes, work.multiplier, chunk.begin, chunk.end);
  });
}

// Makes the passes of a call that has been checked. `norms`: room for those that the first pass returns.
void make_passes(const StepCall& call, int optimizer, double* norms) {
  std::vector<double> hypers = call.hypers.vec();
  if (call.lr.has_value()) hypers[0] = read_number(*call.lr);

  FlatViews views;
  const std::vector<StepRow> rows = step_rows(call, views, norms);
  Recipes recipes(optimizer, std::move(hypers));
  std::vector<size_t> recipe_of(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) recipe_of[i] = recipes.of(rows[i]);
  const double multiplier = call.multiplier.has_value() ? *call.multiplier->const_data_ptr<float>() : 1;
  const StepWork work{rows, recipes, recipe_of, multiplier, optimizer_table()[optimizer].n_norms};

  if (call.passes == Passes::first)
    first_pass(work);
  else if (work.n_norms == 0)
    only_pass(work);
  else if (call.norms.has_value())
    second_pass(work);
  else
    both_passes(work);
  if (call.passes == Passes::all)
    for (const StepRow& row : rows) *row.step += 1;
  views.write_back();
  bump_versions(call);
}

void fused_step_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                 TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                 const OptionalTensor& multiplier, const OptionalTensor& found_inf, const OptionalTensor& norms) {
  const StepCall call{Passes::all, name,   params, grads,      masters,   states,
                      steps,       hypers, lr,     multiplier, found_inf, norms};
  const int optimizer = check_step(call, at::Device(at::kCPU));
  if (!is_skipped(call)) make_passes(call, optimizer, nullptr);
}

Tensor fused_norms_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                    TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                    const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  const OptionalTensor none;
  const StepCall call{Passes::first, name,   params, grads,      masters,   states,
                      steps,         hypers, lr,     multiplier, found_inf, none};
  const int optimizer = check_step(call, at::Device(at::kCPU));
  Tensor norms = at::zeros({int64_t(params.size()), n_norms(call)}, at::kDouble);
  if (!is_skipped(call)) make_passes(call, optimizer, norms.mutable_data_ptr<double>());
  return norms;
}

}  // namespace

TORCH_LIBRARY_IMPL(lightning_apex, CPU, m) {
  m.impl("fused_step_", &fused_step_);
  m.impl("fused_norms_", &fused_norms_);
}

}  // namespace lightning_apex
