// What the host code and Python ask about the rows of optimizers.h.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "optimizers.h"
#include "rows.h"

namespace lightning_apex {

struct OptimizerInfo {
  std::string name;
  std::vector<std::string> states, tensor_states, hypers;
  int n_norms;
};

namespace detail {
template <class F>
OptimizerInfo describe() {
  static_assert(F::n_state <= kMaxStates && F::n_tensor_state <= kMaxTensorStates && F::n_norms <= kMaxNorms,
                "raise kMaxStates, kMaxTensorStates or kMaxNorms in rows.h");
  OptimizerInfo info{F::name(), {}, {}, {}, F::n_norms};
  for (int i = 0; i < F::n_state; ++i) info.states.emplace_back(F::state_name(i));
  for (int i = 0; i < F::n_hyper; ++i) info.hypers.emplace_back(F::hyper_name(i));
  if constexpr (F::n_tensor_state > 0)
    for (int i = 0; i < F::n_tensor_state; ++i) info.tensor_states.emplace_back(F::tensor_state_name(i));
  return info;
}
constexpr size_t largest(std::initializer_list<size_t> sizes) {
  size_t most = 1;
  for (const size_t size : sizes) most = size > most ? size : most;
  return most;
}
}  // namespace detail

// The most bytes of constants that any row needs.
#define LIGHTNING_APEX_CONSTS_SIZE(...) sizeof(__VA_ARGS__::Consts<double>),
constexpr size_t kMaxConstsBytes = detail::largest({LIGHTNING_APEX_OPTIMIZERS(LIGHTNING_APEX_CONSTS_SIZE)});
#undef LIGHTNING_APEX_CONSTS_SIZE

inline const std::vector<OptimizerInfo>& optimizer_table() {
#define LIGHTNING_APEX_DESCRIBE(...) detail::describe<__VA_ARGS__>(),
  static const std::vector<OptimizerInfo> table = {LIGHTNING_APEX_OPTIMIZERS(LIGHTNING_APEX_DESCRIBE)};
#undef LIGHTNING_APEX_DESCRIBE
  return table;
}

// The row called `name`, or -1.
inline int optimizer_index(std::string_view name) {
  const auto& table = optimizer_table();
  for (size_t i = 0; i < table.size(); ++i)
    if (table[i].name == name) return static_cast<int>(i);
  return -1;
}

}  // namespace lightning_apex
