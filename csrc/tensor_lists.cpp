#include "tensor_lists.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "optimizer_table.h"
#include "tensor_facts.h"

namespace lightning_apex {

namespace {

[[noreturn]] void refuse_member(const char* op, const char* name, size_t i, const Tensor& t, at::Device device) {
  TORCH_CHECK_TYPE(t.defined(), op, ": ", name, "[", i, "] is undefined; leave it out of the list");
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.layout() == at::kStrided, op, ": ", name, "[", i, "] has layout ", t.layout(),
      "; only dense tensors are supported, call .to_dense() first (for an embedding: sparse=False)");
  TORCH_CHECK_VALUE(t.device() == device, op, ": ", name, "[", i, "] is on ", t.device(), ", others are on ", device,
                    "; call once for each device");
  TORCH_CHECK_TYPE(false, op, ": ", name, "[", i, "] is ", dtype_name(t.scalar_type()),
                   "; expected torch.float32, torch.float16, torch.bfloat16 or torch.float64");
}

}  // namespace

void check_list(const char* op, const char* name, TensorList list, at::Device device) {
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& t = list[i];
    if (i > 0 && t.key_set() == list[0].key_set() && t.device() == device && is_float(t.scalar_type())) continue;
    if (!t.defined() || t.layout() != at::kStrided || t.device() != device || !is_float(t.scalar_type()))
      refuse_member(op, name, i, t, device);
  }
}

void check_length(const char* op, const char* name, size_t length, const char* of, size_t wanted) {
  TORCH_CHECK_VALUE(length == wanted, op, ": ", name, " has ", length, " tensors, expected ", wanted, " (", of, ")");
}

void check_shapes(const char* op, const char* name, TensorList list, const char* of, TensorList wanted) {
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& leader = wanted[i % wanted.size()];
    TORCH_CHECK_VALUE(list[i].sizes() == leader.sizes(), op, ": ", name, "[", i, "] has shape ", list[i].sizes(),
                      ", expected ", leader.sizes(), " as ", of, "[", i % wanted.size(), "]");
  }
}

void check_value(const char* op, const char* name, const Tensor& t, ScalarType dtype, int64_t numel,
                 at::Device device) {
  TORCH_CHECK_VALUE(t.defined() && t.layout() == at::kStrided && t.device() == device, op, ": ", name,
                    " must be a dense tensor on ", device);
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, op, ": ", name, " must be ", dtype_name(dtype), ", not ",
                   dtype_name(t.scalar_type()));
  TORCH_CHECK_VALUE(t.numel() == numel && t.is_contiguous(), op, ": ", name, " must be contiguous with ", numel,
                    numel == 1 ? " element" : " elements", ", it has shape ", t.sizes());
}

void check_value(const char* op, const char* name, const OptionalTensor& t, ScalarType dtype, int64_t numel,
                 at::Device device) {
  if (t.has_value()) check_value(op, name, *t, dtype, numel, device);
}

void check_no_overlap(const char* op, const char* name, TensorList list) {
  for (size_t i = 0; i < list.size(); ++i)
    TORCH_CHECK_VALUE(!may_overlap(list[i]), op, ": ", name, "[", i,
                      "] is written, but its elements share memory (shape ", list[i].sizes(), ", strides ",
                      list[i].strides(), "); call .contiguous() or .clone() on it first");
}

void bump_versions(TensorList list) {
  for (const Tensor& t : list)
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// ---- flat views ----

const Tensor& FlatViews::lend(Tensor temporary, const Tensor& t, Access access) {
  if (access != Access::write) temporary.copy_(t);
  if (access != Access::read) written_.emplace_back(t, temporary);
  temporaries_.push_back(std::move(temporary));
  return temporaries_.back();
}

const Tensor& FlatViews::lead(const Tensor& t, Access access) {
  if (t.is_non_overlapping_and_dense()) return t;
  const at::NoGradGuard no_grad;
  return lend(at::empty(t.sizes(), t.options().requires_grad(false)), t, access);
}

const Tensor& FlatViews::follow(const Tensor& t, const Tensor& leader, Access access) {
  if (same_order(t, leader)) return t;
  const at::NoGradGuard no_grad;
  return lend(at::empty_strided(t.sizes(), leader.strides(), t.options().requires_grad(false)), t, access);
}

void FlatViews::write_back() {
  if (written_.empty()) return;
  const at::NoGradGuard no_grad;
  for (const auto& [original, temporary] : written_) original.copy_(temporary);
  written_.clear();
}

// ---- fused_step_ ----

namespace {

constexpr const char* kStep = "fused_step_";

void check_step_dtypes(const StepCall& call, size_t n_state) {
  const size_t n = call.params.size();
  for (size_t i = 0; i < n; ++i) {
    const ScalarType param = call.params[i].scalar_type(), grad = call.grads[i].scalar_type();
    TORCH_CHECK_TYPE(grad == param || (grad == ScalarType::Float && is_half(param)), kStep, ": grads[", i, "] is ",
                     dtype_name(grad), " and params[", i, "] is ", dtype_name(param),
                     "; a gradient has its parameter's dtype, or float32 for a half parameter");
    if (!call.masters.empty()) {
      TORCH_CHECK_TYPE(is_half(param), kStep, ": params[", i, "] is ", dtype_name(param),
                       "; only float16 and bfloat16 parameters have masters, call once for each kind");
      TORCH_CHECK_TYPE(call.masters[i].scalar_type() == ScalarType::Float, kStep, ": masters[", i, "] is ",
                       dtype_name(call.masters[i].scalar_type()), "; expected torch.float32");
    }
    for (size_t s = 0; s < n_state; ++s) {
      const ScalarType state = call.states[s * n + i].scalar_type();
      const bool fits = param == ScalarType::Double ? state == ScalarType::Double
                                                    : state == ScalarType::Float || state == ScalarType::BFloat16;
      TORCH_CHECK_TYPE(fits, kStep, ": states[", s * n + i, "] is ", dtype_name(state), "; for a parameter that is ",
                       dtype_name(param), " expected ",
                       param == ScalarType::Double ? "torch.float64" : "torch.float32 or torch.bfloat16");
      TORCH_CHECK_TYPE(state == call.states[i].scalar_type(), kStep, ": states[", s * n + i, "] is ", dtype_name(state),
                       " and states[", i, "] is ", dtype_name(call.states[i].scalar_type()),
                       "; the states of one parameter have one dtype");
    }
  }
}

// Whether params[i] and what belongs to it need no further look. `plain` knows params[0].
bool is_plain_row(const StepCall& call, size_t i, size_t n_state, const Plain& plain) {
  const size_t n = call.params.size();
  const Tensor& param = call.params[i];
  const ScalarType dtype = param.scalar_type();
  const bool has_master = !call.masters.empty();
  if (!plain(param) || !is_float(dtype) || (has_master && !is_half(dtype))) return false;
  const at::IntArrayRef sizes = param.sizes();
  if (!plain(call.grads[i], dtype, sizes)) return false;
  if (has_master && !plain(call.masters[i], ScalarType::Float, sizes)) return false;
  const ScalarType state = dtype == ScalarType::Double ? dtype : ScalarType::Float;
  for (size_t s = 0; s < n_state; ++s)
    if (!plain(call.states[s * n + i], state, sizes)) return false;
  const Tensor& step = call.steps[i];
  return plain(step) && step.scalar_type() == ScalarType::Float && step.numel() == 1;
}

bool all_plain(const StepCall& call, size_t n_state, at::Device device) {
  if (call.params.empty()) return true;
  check_list(kStep, "params", call.params.slice(0, 1), device);
  const Plain plain(call.params[0]);
  for (size_t i = 0; i < call.params.size(); ++i)
    if (!is_plain_row(call, i, n_state, plain)) return false;
  return true;
}

void check_step_controls(const StepCall& call, at::Device device) {
  check_value(kStep, "multiplier", call.multiplier, ScalarType::Float, 1, device);
  check_value(kStep, "found_inf", call.found_inf, ScalarType::Float, 1, device);
  if (!call.lr.has_value()) return;
  const Tensor& lr = *call.lr;
  TORCH_CHECK_VALUE(lr.numel() == 1 && lr.layout() == at::kStrided && (lr.device() == device || lr.device().is_cpu()),
                    kStep, ": lr must hold one number, on ", device, " or the CPU; it has shape ", lr.sizes(), " on ",
                    lr.device());
  TORCH_CHECK_TYPE(is_float(lr.scalar_type()), kStep, ": lr is ", dtype_name(lr.scalar_type()),
                   "; expected a floating-point tensor");
}

void check_step_lists(const StepCall& call, size_t n_state, at::Device device) {
  for (size_t i = 0; i < call.steps.size(); ++i)
    check_value(kStep, ("steps[" + std::to_string(i) + "]").c_str(), call.steps[i], ScalarType::Float, 1, device);
  const std::pair<const char*, TensorList> lists[] = {
      {"params", call.params}, {"masters", call.masters}, {"states", call.states}, {"grads", call.grads}};
  for (const auto& [name, list] : lists) {
    check_list(kStep, name, list, device);
    check_shapes(kStep, name, list, "params", call.params);
    if (list.data() != call.grads.data()) check_no_overlap(kStep, name, list);
  }
  check_step_dtypes(call, n_state);
}

}  // namespace

int check_step(std::string_view name, const StepCall& call, at::Device device) {
  const int index = optimizer_index(name);
  TORCH_CHECK_VALUE(index >= 0, kStep, ": there is no optimizer \"", name, "\"; optimizer_table() lists them");
  const OptimizerInfo& info = optimizer_table()[index];
  const size_t n = call.params.size(), n_state = info.states.size();
  check_length(kStep, "grads", call.grads.size(), "one for each parameter", n);
  if (!call.masters.empty()) check_length(kStep, "masters", call.masters.size(), "none, or one for each parameter", n);
  check_length(kStep, "states", call.states.size(), "all parameters' first states, then all second, ...", n_state * n);
  check_length(kStep, "steps", call.steps.size(), "one for each parameter", n);
  TORCH_CHECK_VALUE(call.hypers.size() == info.hypers.size(), kStep, ": hypers has ", call.hypers.size(), " values, \"",
                    name, "\" takes ", info.hypers.size());
  check_step_controls(call, device);
  if (!all_plain(call, n_state, device)) check_step_lists(call, n_state, device);
  return index;
}

std::vector<StepRow> step_rows(const StepCall& call, FlatViews& views) {
  const size_t n = call.params.size(), n_state = n == 0 ? 0 : call.states.size() / n;
  std::vector<StepRow> rows(n);
  for (size_t i = 0; i < n; ++i) {
    StepRow& row = rows[i];
    const Tensor& param = views.lead(call.params[i], Access::read_write);
    const auto flat = [&, contiguous = param.is_contiguous()](const Tensor& t, Access access) -> const Tensor& {
      return contiguous && t.is_contiguous() ? t : views.follow(t, param, access);
    };
    row.param = param.mutable_data_ptr();
    row.grad = flat(call.grads[i], Access::read).const_data_ptr();
    row.master = nullptr;
    if (!call.masters.empty()) row.master = flat(call.masters[i], Access::read_write).mutable_data_ptr<float>();
    for (size_t s = 0; s < n_state; ++s)
      row.state[s] = flat(call.states[s * n + i], Access::read_write).mutable_data_ptr();
    row.step = static_cast<float*>(call.steps[i].mutable_data_ptr());
    row.numel = param.numel();
    row.param_dtype = param.scalar_type();
    row.grad_dtype = call.grads[i].scalar_type();
    row.state_dtype = n_state == 0 ? (row.param_dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float)
                                   : call.states[i].scalar_type();
  }
  return rows;
}

void bump_versions(const StepCall& call) {
  for (const TensorList list : {call.params, call.masters, call.states, call.steps}) bump_versions(list);
}

// ---- the other operators ----

void check_copy(TensorList dst, TensorList src, const OptionalTensor& multiplier, const OptionalTensor& found_inf,
                at::Device device) {
  constexpr const char* op = "copy_scaled_";
  check_length(op, "src", src.size(), "one for each dst", dst.size());
  check_value(op, "multiplier", multiplier, ScalarType::Float, 1, device);
  check_value(op, "found_inf", found_inf, ScalarType::Float, 1, device);
  check_list(op, "dst", dst, device);
  check_list(op, "src", src, device);
  check_shapes(op, "src", src, "dst", dst);
  check_no_overlap(op, "dst", dst);
}

std::vector<CopyRow> copy_rows(TensorList dst, TensorList src, FlatViews& views) {
  std::vector<CopyRow> rows;
  rows.reserve(dst.size());
  for (size_t i = 0; i < dst.size(); ++i) {
    const Tensor& to = views.lead(dst[i], Access::write);
    const Tensor& from = views.follow(src[i], to, Access::read);
    rows.push_back({to.mutable_data_ptr(), from.const_data_ptr(), to.numel(), to.scalar_type(), from.scalar_type()});
  }
  return rows;
}

std::vector<CopyRow> single_rows(TensorList list, Access access, FlatViews& views) {
  std::vector<CopyRow> rows;
  rows.reserve(list.size());
  for (const Tensor& member : list) {
    const Tensor& t = views.lead(member, access);
    // A tensor that is only read is not made to own its memory (copy on write).
    void* dst = access == Access::read ? nullptr : t.mutable_data_ptr();
    rows.push_back({dst, dst != nullptr ? dst : t.const_data_ptr(), t.numel(), t.scalar_type(), t.scalar_type()});
  }
  return rows;
}

void check_reconcile(TensorList masters, TensorList params, at::Device device) {
  constexpr const char* op = "reconcile_masters_";
  check_length(op, "masters", masters.size(), "one for each parameter", params.size());
  check_list(op, "masters", masters, device);
  check_list(op, "params", params, device);
  check_shapes(op, "masters", masters, "params", params);
  check_no_overlap(op, "masters", masters);
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_TYPE(masters[i].scalar_type() == ScalarType::Float, op, ": masters[", i, "] is ",
                     dtype_name(masters[i].scalar_type()), "; expected torch.float32");
    TORCH_CHECK_TYPE(is_half(params[i].scalar_type()), op, ": params[", i, "] is ", dtype_name(params[i].scalar_type()),
                     "; only float16 and bfloat16 parameters have masters");
  }
}

std::vector<CopyRow> reconcile_rows(TensorList masters, TensorList params, FlatViews& views) {
  std::vector<CopyRow> rows;
  rows.reserve(masters.size());
  for (size_t i = 0; i < masters.size(); ++i) {
    const Tensor& master = views.lead(masters[i], Access::read_write);
    const Tensor& param = views.follow(params[i], master, Access::read);
    rows.push_back(
        {master.mutable_data_ptr(), param.const_data_ptr(), master.numel(), ScalarType::Float, param.scalar_type()});
  }
  return rows;
}

}  // namespace lightning_apex
