// What the door asks about a single tensor, or about two. Inline: a step asks it thousands of times.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lightning_apex {

// "torch.float32"
inline std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "torch.float32";
    case at::kDouble:
      return "torch.float64";
    case at::kHalf:
      return "torch.float16";
    case at::kBFloat16:
      return "torch.bfloat16";
    case at::kByte:
      return "torch.uint8";
    case at::kInt:
      return "torch.int32";
    case at::kLong:
      return "torch.int64";
    default:
      return std::string("torch ") + c10::toString(dtype);
  }
}

inline bool is_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
}

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Whether two elements may share memory. Sorted by stride, every dimension must step over all that the smaller ones
// reach; that also refuses a few interleaved as_strided views without a shared element, which nobody updates.
inline bool may_overlap(const at::Tensor& t) {
  if (t.is_non_overlapping_and_dense() || t.numel() < 2) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

// Whether the dense tensor `leader` and `t`, of its shape, have their elements in the same order, without gaps.
inline bool same_order(const at::Tensor& t, const at::Tensor& leader) {
  if (t.is_contiguous() && leader.is_contiguous()) return true;
  if (!t.is_non_overlapping_and_dense()) return false;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) != leader.stride(d)) return false;
  return true;
}

// How far ahead a loop over thousands of tensors asks for what it will look at: as many small tensors as a step updates
// are in no near cache, and waiting for each in turn is what their step takes.
constexpr size_t kLookAhead = 12;

inline void prefetch(const void* address, size_t bytes = 1) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(address) + at);
}

inline void prefetch(const at::Tensor& t) { prefetch(t.unsafeGetTensorImpl(), sizeof(c10::TensorImpl)); }

inline void prefetch(at::TensorList list, size_t i) {
  if (i < list.size()) prefetch(list[i]);
}

// Where a tensor's address is kept. The tensor itself was asked for before.
inline void prefetch_storage(at::TensorList list, size_t i) {
  if (i < list.size() && list[i].has_storage()) prefetch(list[i].storage().unsafeGetStorageImpl(), 128);
}

// Recognises at little cost the tensors that nearly all are: contiguous, with the device and the dispatch keys of one
// that has been checked (and so neither undefined nor sparse). No reason to refuse one that it does not know.
class Plain {
 public:
  explicit Plain(const at::Tensor& checked) : keys_(checked.key_set()), device_(checked.device()) {}
  bool operator()(const at::Tensor& t) const {
    return t.key_set() == keys_ && t.is_contiguous() && t.device() == device_;
  }
  bool operator()(const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) const {
    return operator()(t) && t.scalar_type() == dtype && t.sizes() == sizes;
  }

 private:
  c10::DispatchKeySet keys_;
  at::Device device_;
};

}  // namespace lightning_apex
