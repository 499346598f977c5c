#include "tensor_lists.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <cmath>

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
  for (size_t i = 0; i < list.size(); ++i) {
    prefetch(list, i + kLookAhead);
    if (!list[i].is_inference()) list[i].unsafeGetTensorImpl()->bump_version();
  }
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

// ---- the other operators ----

bool is_max_norm(double ord) {
  const bool is_max = ord > 0 && std::isinf(ord);
  TORCH_CHECK_VALUE(is_max || ord == 2, "tensor_norms: ord is ", ord, "; expected 2 or inf");
  return is_max;
}

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
