#include "step_call.h"

#include <algorithm>

#include "optimizer_table.h"
#include "tensor_facts.h"

namespace lightning_apex {

namespace {

const OptimizerInfo& optimizer_of(const StepCall& call) {
  const int index = optimizer_index(call.name);
  TORCH_CHECK_VALUE(index >= 0, call.op(), ": there is no optimizer \"", call.name, "\"; optimizer_table() lists them");
  return optimizer_table()[index];
}

// `states` of a call: all parameters' first states, then all second, ..., then likewise those of one number a tensor.
struct StateLists {
  TensorList of_elements, of_tensors;
  StateLists(const StepCall& call, const OptimizerInfo& info)
      : of_elements(call.states.slice(0, info.states.size() * call.params.size())),
        of_tensors(call.states.slice(of_elements.size())) {}
};

ScalarType tensor_state_dtype(ScalarType param) {
  return param == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

void check_gradient_and_master(const StepCall& call, size_t i) {
  const ScalarType param = call.params[i].scalar_type(), grad = call.grads[i].scalar_type();
  TORCH_CHECK_TYPE(grad == param || (grad == ScalarType::Float && is_half(param)), call.op(), ": grads[", i, "] is ",
                   dtype_name(grad), " and params[", i, "] is ", dtype_name(param),
                   "; a gradient has its parameter's dtype, or float32 for a half parameter");
  if (call.masters.empty()) return;
  TORCH_CHECK_TYPE(is_half(param), call.op(), ": params[", i, "] is ", dtype_name(param),
                   "; only float16 and bfloat16 parameters have masters, call once for each kind");
  TORCH_CHECK_TYPE(call.masters[i].scalar_type() == ScalarType::Float, call.op(), ": masters[", i, "] is ",
                   dtype_name(call.masters[i].scalar_type()), "; expected torch.float32");
}

void check_states(const StepCall& call, TensorList states) {
  const size_t n = call.params.size();
  for (size_t k = 0; k < states.size(); ++k) {
    const ScalarType param = call.params[k % n].scalar_type(), state = states[k].scalar_type();
    const bool fits = param == ScalarType::Double ? state == ScalarType::Double
                                                  : state == ScalarType::Float || state == ScalarType::BFloat16;
    TORCH_CHECK_TYPE(fits, call.op(), ": states[", k, "] is ", dtype_name(state), "; for a parameter that is ",
                     dtype_name(param), " expected ",
                     param == ScalarType::Double ? "torch.float64" : "torch.float32 or torch.bfloat16");
    TORCH_CHECK_TYPE(state == states[k % n].scalar_type(), call.op(), ": states[", k, "] is ", dtype_name(state),
                     " and states[", k % n, "] is ", dtype_name(states[k % n].scalar_type()),
                     "; the states of one parameter have one dtype");
  }
}

void check_number(const StepCall& call, const char* list, size_t i, const Tensor& t, ScalarType dtype,
                  at::Device device) {
  check_value(call.op(), (list + ("[" + std::to_string(i) + "]")).c_str(), t, dtype, 1, device);
}

// Calls body(list, place in it) for params[i] and what belongs to it.
template <class Body>
void for_row(const StepCall& call, size_t i, const Body& body) {
  const size_t n = call.params.size();
  if (i >= n) return;
  for (const TensorList list : {call.params, call.grads, call.masters, call.steps}) body(list, i);
  for (size_t k = i; k < call.states.size(); k += n) body(call.states, k);
}

// Whether params[i] and what belongs to it need no further look. `plain` knows params[0].
bool is_plain_row(const StepCall& call, size_t i, const StateLists& states, const Plain& plain) {
  const size_t n = call.params.size();
  const Tensor& param = call.params[i];
  const ScalarType dtype = param.scalar_type();
  const bool has_master = !call.masters.empty();
  if (!plain(param) || !is_float(dtype) || (has_master && !is_half(dtype))) return false;
  const at::IntArrayRef sizes = param.sizes();
  if (!plain(call.grads[i], dtype, sizes)) return false;
  if (has_master && !plain(call.masters[i], ScalarType::Float, sizes)) return false;
  const auto is_plain_number = [&plain](const Tensor& t, ScalarType wanted) {
    return plain(t) && t.scalar_type() == wanted && t.numel() == 1;
  };
  const ScalarType state = tensor_state_dtype(dtype);
  for (size_t k = i; k < states.of_elements.size(); k += n)
    if (!plain(states.of_elements[k], state, sizes)) return false;
  for (size_t k = i; k < states.of_tensors.size(); k += n)
    if (!is_plain_number(states.of_tensors[k], state)) return false;
  return is_plain_number(call.steps[i], ScalarType::Float);
}

bool all_plain(const StepCall& call, const StateLists& states, at::Device device) {
  if (call.params.empty()) return true;
  check_list(call.op(), "params", call.params.slice(0, 1), device);
  const Plain plain(call.params[0]);
  for (size_t i = 0; i < call.params.size(); ++i) {
    for_row(call, i + kLookAhead, [](TensorList list, size_t k) { prefetch(list, k); });
    if (!is_plain_row(call, i, states, plain)) return false;
  }
  return true;
}

void check_controls(const StepCall& call, int n_norms, at::Device device) {
  const char* op = call.op();
  check_value(op, "multiplier", call.multiplier, ScalarType::Float, 1, device);
  check_value(op, "found_inf", call.found_inf, ScalarType::Float, 1, device);
  TORCH_CHECK_VALUE(!call.norms.has_value() || n_norms > 0, op, ": norms are given, but \"", call.name,
                    "\" needs none; leave them out");
  check_value(op, "norms", call.norms, ScalarType::Double, int64_t(call.params.size()) * n_norms, device);
  if (!call.lr.has_value()) return;
  const Tensor& lr = *call.lr;
  TORCH_CHECK_VALUE(lr.numel() == 1 && lr.layout() == at::kStrided && (lr.device() == device || lr.device().is_cpu()),
                    op, ": lr must hold one number, on ", device, " or the CPU; it has shape ", lr.sizes(), " on ",
                    lr.device());
  TORCH_CHECK_TYPE(is_float(lr.scalar_type()), op, ": lr is ", dtype_name(lr.scalar_type()),
                   "; expected a floating-point tensor");
}

void check_lists(const StepCall& call, const StateLists& states, at::Device device) {
  const char* op = call.op();
  for (size_t i = 0; i < call.steps.size(); ++i)
    check_number(call, "steps", i, call.steps[i], ScalarType::Float, device);
  const std::pair<const char*, TensorList> lists[] = {
      {"params", call.params}, {"masters", call.masters}, {"states", states.of_elements}, {"grads", call.grads}};
  for (const auto& [name, list] : lists) {
    check_list(op, name, list, device);
    check_shapes(op, name, list, "params", call.params);
    if (list.data() != call.grads.data()) check_no_overlap(op, name, list);
  }
  for (size_t i = 0; i < call.params.size(); ++i) check_gradient_and_master(call, i);
  check_states(call, states.of_elements);
  for (size_t k = 0; k < states.of_tensors.size(); ++k)
    check_number(call, "states", states.of_elements.size() + k, states.of_tensors[k],
                 tensor_state_dtype(call.params[k % call.params.size()].scalar_type()), device);
}

}  // namespace

int check_step(const StepCall& call, at::Device device) {
  const OptimizerInfo& info = optimizer_of(call);
  const char* op = call.op();
  const size_t n = call.params.size(), n_state = info.states.size() + info.tensor_states.size();
  if (call.passes == Passes::first) n_norms(call);
  check_length(op, "grads", call.grads.size(), "one for each parameter", n);
  if (!call.masters.empty()) check_length(op, "masters", call.masters.size(), "none, or one for each parameter", n);
  check_length(op, "states", call.states.size(), "all parameters' first states, then all second, ...", n_state * n);
  check_length(op, "steps", call.steps.size(), "one for each parameter", n);
  TORCH_CHECK_VALUE(call.hypers.size() == info.hypers.size(), op, ": hypers has ", call.hypers.size(), " values, \"",
                    call.name, "\" takes ", info.hypers.size());
  check_controls(call, info.n_norms, device);
  const StateLists states(call, info);
  if (!all_plain(call, states, device)) check_lists(call, states, device);
  return static_cast<int>(&info - optimizer_table().data());
}

int64_t n_norms(const StepCall& call) {
  const OptimizerInfo& info = optimizer_of(call);
  TORCH_CHECK_VALUE(info.n_norms > 0, call.op(), ": \"", call.name, "\" needs no norms; call fused_step_ alone");
  return info.n_norms;
}

// Where a master without elements is. Never read or written.
static float of_an_empty_one;

std::vector<StepRow> step_rows(const StepCall& call, FlatViews& views, double* norms) {
  const OptimizerInfo& info = optimizer_of(call);
  const StateLists states(call, info);
  const size_t n = call.params.size();
  // The first pass alone leaves parameters as they are.
  const Access access = call.passes == Passes::first ? Access::read : Access::read_write;
  const auto address = [access](const Tensor& t) {
    return access == Access::read ? const_cast<void*>(t.const_data_ptr()) : t.mutable_data_ptr();
  };
  if (call.norms.has_value()) norms = const_cast<double*>(call.norms->const_data_ptr<double>());
  std::vector<StepRow> rows(n);
  for (size_t i = 0; i < n; ++i) {
    for_row(call, i + 2 * kLookAhead, [](TensorList list, size_t k) { prefetch(list, k); });
    for_row(call, i + kLookAhead, [](TensorList list, size_t k) { prefetch_storage(list, k); });
    StepRow& row = rows[i];
    const Tensor& param = views.lead(call.params[i], access);
    const auto flat = [&, contiguous = param.is_contiguous()](const Tensor& t, Access how) -> const Tensor& {
      return contiguous && t.is_contiguous() ? t : views.follow(t, param, how);
    };
    row.param = address(param);
    row.grad = flat(call.grads[i], Access::read).const_data_ptr();
    row.master = nullptr;
    if (!call.masters.empty()) {
      row.master = static_cast<float*>(address(flat(call.masters[i], access)));
      if (row.master == nullptr) row.master = &of_an_empty_one;  // still of the kind that has masters
    }
    for (size_t s = 0; s < info.states.size(); ++s)
      row.state[s] = flat(states.of_elements[s * n + i], Access::read_write).mutable_data_ptr();
    for (size_t s = 0; s < info.tensor_states.size(); ++s)
      row.tensor_state[s] = states.of_tensors[s * n + i].mutable_data_ptr();
    row.step = static_cast<float*>(call.steps[i].mutable_data_ptr());
    row.norms = norms == nullptr ? nullptr : norms + i * info.n_norms;
    row.numel = param.numel();
    row.param_dtype = param.scalar_type();
    row.grad_dtype = call.grads[i].scalar_type();
    row.state_dtype = info.states.empty() ? tensor_state_dtype(row.param_dtype) : call.states[i].scalar_type();
  }
  return rows;
}

void bump_versions(const StepCall& call) {
  bump_versions(call.states);
  if (call.passes == Passes::first) return;
  for (const TensorList list : {call.params, call.masters, call.steps}) bump_versions(list);
}

}  // namespace lightning_apex
