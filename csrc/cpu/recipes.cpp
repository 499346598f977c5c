#include "recipes.h"

#include <cstring>
#include <utility>

namespace lightning_apex {

namespace {

// The formulas' functions on constants, for a parameter that is a double or not.
struct Functions {
  bool (*takes_maxima)(const double* hypers);
  void (*prepare)(const double* hypers, double step, bool is_double, Consts& to);
  void (*finish)(const double* hypers, double step, const double* norms, const StepRow& row, Consts& consts);
};

template <class F>
bool takes_maxima([[maybe_unused]] const double* hypers) {
  if constexpr (F::n_norms > 0)
    return F::takes_maxima(hypers);
  else
    return false;
}

template <class F, class S>
void prepare_as(const double* hypers, double step, Consts& to) {
  const auto consts = F::template prepare<S>(hypers, step);
  std::memcpy(to.bytes, &consts, sizeof(consts));
}
template <class F>
void prepare(const double* hypers, double step, bool is_double, Consts& to) {
  is_double ? prepare_as<F, double>(hypers, step, to) : prepare_as<F, float>(hypers, step, to);
}

template <class F, class S>
void finish_as(const double* hypers, double step, const double* norms, const StepRow& row, Consts& to) {
  double states[kMaxTensorStates] = {};
  for (int k = 0; k < F::n_tensor_state; ++k) states[k] = *static_cast<const S*>(row.tensor_state[k]);
  typename F::template Consts<S> consts;
  std::memcpy(&consts, to.bytes, sizeof(consts));
  F::finish(hypers, step, norms, states, consts);
  std::memcpy(to.bytes, &consts, sizeof(consts));
  for (int k = 0; k < F::n_tensor_state; ++k) *static_cast<S*>(row.tensor_state[k]) = S(states[k]);
}
template <class F>
void finish([[maybe_unused]] const double* hypers, [[maybe_unused]] double step, [[maybe_unused]] const double* norms,
            [[maybe_unused]] const StepRow& row, [[maybe_unused]] Consts& consts) {
  if constexpr (F::n_norms > 0)
    row.param_dtype == ScalarType::Double ? finish_as<F, double>(hypers, step, norms, row, consts)
                                          : finish_as<F, float>(hypers, step, norms, row, consts);
}

#define LIGHTNING_APEX_FUNCTIONS(...) {&takes_maxima<__VA_ARGS__>, &prepare<__VA_ARGS__>, &finish<__VA_ARGS__>},
constexpr Functions kFunctions[] = {LIGHTNING_APEX_OPTIMIZERS(LIGHTNING_APEX_FUNCTIONS)};
#undef LIGHTNING_APEX_FUNCTIONS

}  // namespace

Recipes::Recipes(int optimizer, std::vector<double> hypers)
    : optimizer_(optimizer),
      hypers_(std::move(hypers)),
      maxima_(kFunctions[optimizer].takes_maxima(hypers_.data())),
      n_norms_(optimizer_table()[optimizer].n_norms) {}

bool Recipes::same(const StepRow& row) const {
  return *row.step == last_step_ && row.param_dtype == last_.param_dtype && row.grad_dtype == last_.grad_dtype &&
         row.state_dtype == last_.state_dtype && (row.master == nullptr) == (last_.master == nullptr);
}

size_t Recipes::of(const StepRow& row) {
  if (list_.empty() || !same(row)) {
    last_ = row;
    last_step_ = *row.step;
    const Backend& backend = cpu_backend();
    const bool master = row.master != nullptr;
    Recipe& recipe = list_.emplace_back();
    recipe.update = backend.step(optimizer_, row.param_dtype, row.grad_dtype, row.state_dtype, master);
    recipe.gather = backend.gather(optimizer_, maxima_, row.param_dtype, row.grad_dtype, row.state_dtype, master);
    // The stored count includes this update, in float32: past 2^24 steps it stands still, as torch's does.
    recipe.step = double(last_step_) + 1;
    kFunctions[optimizer_].prepare(hypers_.data(), recipe.step, row.param_dtype == ScalarType::Double, recipe.consts);
  }
  return list_.size() - 1;
}

Consts Recipes::finish(const Recipe& recipe, const StepRow& row, const double* norms) const {
  Consts consts = recipe.consts;
  kFunctions[optimizer_].finish(hypers_.data(), recipe.step, norms, row, consts);
  return consts;
}

void Recipes::combine(double* norms, const double* others) const {
  for (int k = 0; k < n_norms_; ++k) {
    norms[k] = maxima_ ? larger(norms[k], others[k]) : norms[k] + others[k];
  }
}

}  // namespace lightning_apex
