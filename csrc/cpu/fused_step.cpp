// fused_step_ on the CPU: one pass over parameters, gradients, masters and states.
#include <torch/library.h>

#include <cstddef>
#include <cstring>

#include "../optimizer_table.h"
#include "../tensor_lists.h"
#include "backend.h"
#include "parallel.h"

namespace lightning_apex {

namespace {

// A formula's constants for one tensor, of float or double as its parameter is.
struct Consts {
  alignas(16) std::byte bytes[kMaxConstsBytes];
};

template <class F, class S>
void prepare_as(const double* hypers, double step, Consts& to) {
  const auto consts = F::template prepare<S>(hypers, step);
  std::memcpy(to.bytes, &consts, sizeof(consts));
}

template <class F>
void prepare(const double* hypers, double step, bool is_double, Consts& to) {
  is_double ? prepare_as<F, double>(hypers, step, to) : prepare_as<F, float>(hypers, step, to);
}

using PrepareFn = void (*)(const double*, double, bool, Consts&);
#define LIGHTNING_APEX_PREPARE(...) &prepare<__VA_ARGS__>,
constexpr PrepareFn kPrepare[] = {LIGHTNING_APEX_OPTIMIZERS(LIGHTNING_APEX_PREPARE)};
#undef LIGHTNING_APEX_PREPARE

// What rows share as long as they follow each other with the same dtypes and step count, which nearly all do.
struct Recipe {
  StepFn kernel;
  Consts consts;
};

class Recipes {
 public:
  Recipes(int optimizer, std::vector<double> hypers) : optimizer_(optimizer), hypers_(std::move(hypers)) {}
  size_t of(const StepRow& row) {
    if (list_.empty() || !same(row)) {
      last_ = row;
      last_step_ = *row.step;
      const Backend& backend = cpu_backend();
      Recipe& recipe = list_.emplace_back();
      recipe.kernel = backend.step(optimizer_, row.param_dtype, row.grad_dtype, row.state_dtype, row.master != nullptr);
      // The stored count includes this update, in float32: past 2^24 steps it stands still, as torch's does.
      kPrepare[optimizer_](hypers_.data(), last_step_ + 1, row.param_dtype == ScalarType::Double, recipe.consts);
    }
    return list_.size() - 1;
  }
  const Recipe& operator[](size_t i) const { return list_[i]; }

 private:
  bool same(const StepRow& row) const {
    return *row.step == last_step_ && row.param_dtype == last_.param_dtype && row.grad_dtype == last_.grad_dtype &&
           row.state_dtype == last_.state_dtype && (row.master == nullptr) == (last_.master == nullptr);
  }
  int optimizer_;
  std::vector<double> hypers_;
  std::vector<Recipe> list_;
  StepRow last_{};
  float last_step_ = 0;
};

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

void fused_step_(std::string_view name, TensorList params, TensorList grads, TensorList masters, TensorList states,
                 TensorList steps, at::ArrayRef<double> hypers, const OptionalTensor& lr,
                 const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  const StepCall call{params, grads, masters, states, steps, hypers, lr, multiplier, found_inf};
  const int optimizer = check_step(name, call, at::Device(at::kCPU));
  if (found_inf.has_value() && *found_inf->const_data_ptr<float>() != 0) return;

  std::vector<double> values = hypers.vec();
  if (lr.has_value()) values[0] = read_number(*lr);
  const double factor = multiplier.has_value() ? *multiplier->const_data_ptr<float>() : 1;

  FlatViews views;
  const std::vector<StepRow> rows = step_rows(call, views);
  Recipes recipes(optimizer, std::move(values));
  std::vector<size_t> recipe_of(rows.size());
  ChunkPlan plan(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    recipe_of[i] = recipes.of(rows[i]);
    plan.add(rows[i].numel);
  }
  plan.run([&](size_t, const Chunk& chunk) {
    const Recipe& recipe = recipes[recipe_of[chunk.row]];
    recipe.kernel(rows[chunk.row], recipe.consts.bytes, factor, chunk.begin, chunk.end);
  });
  for (const StepRow& row : rows) *row.step += 1;
  views.write_back();
  bump_versions(call);
}

}  // namespace

TORCH_LIBRARY_IMPL(lightning_apex, CPU, m) { m.impl("fused_step_", &fused_step_); }

}  // namespace lightning_apex
