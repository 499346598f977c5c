// The door of every operator: checks that a call makes sense before anything is written, and the flat view of its
// tensors (raw pointers and element counts, in storage order) that both engines walk.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rows.h"

namespace lightning_apex {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;

// ---- checks; `op` and `name` go into the message ----

// Every member is a strided tensor on `device`, of dtype float16, bfloat16, float32 or float64.
void check_list(const char* op, const char* name, TensorList list, at::Device device);
void check_length(const char* op, const char* name, size_t length, const char* of, size_t wanted);
void check_shapes(const char* op, const char* name, TensorList list, const char* of, TensorList wanted);
// A control value: `numel` elements of `dtype`, dense, on `device`.
void check_value(const char* op, const char* name, const Tensor& t, ScalarType dtype, int64_t numel, at::Device device);
void check_value(const char* op, const char* name, const OptionalTensor& t, ScalarType dtype, int64_t numel,
                 at::Device device);
// No element of a member is another one too, as in an expanded tensor: what would be written there is undefined.
void check_no_overlap(const char* op, const char* name, TensorList list);

// Tells autograd's version counters that these tensors were written.
void bump_versions(TensorList list);

// ---- flat views ----

enum class Access { read, write, read_write };

// Lends every tensor of a row as one dense run of memory in its leader's element order: the tensor itself where its
// strides allow it, a temporary otherwise. Temporaries live as long as this object.
class FlatViews {
 public:
  // `t` decides the order of its row.
  const Tensor& lead(const Tensor& t, Access access);
  // `t` has the leader's shape and is lent in the leader's order. `leader` is what lead() returned.
  const Tensor& follow(const Tensor& t, const Tensor& leader, Access access);
  // Copies what was written to temporaries into the tensors they stand for.
  void write_back();

 private:
  const Tensor& lend(Tensor temporary, const Tensor& t, Access access);
  std::deque<Tensor> temporaries_;
  std::vector<std::pair<Tensor, Tensor>> written_;  // (original, temporary)
};

// ---- the operators on one or two lists ----

// Whether `ord` of tensor_norms is infinity; refuses all but that and 2.
bool is_max_norm(double ord);

void check_copy(TensorList dst, TensorList src, const OptionalTensor& multiplier, const OptionalTensor& found_inf,
                at::Device device);
std::vector<CopyRow> copy_rows(TensorList dst, TensorList src, FlatViews& views);
// In place (`access` read_write), or read only.
std::vector<CopyRow> single_rows(TensorList list, Access access, FlatViews& views);

void check_reconcile(TensorList masters, TensorList params, at::Device device);
// dst: the master, src: the parameter.
std::vector<CopyRow> reconcile_rows(TensorList masters, TensorList params, FlatViews& views);

}  // namespace lightning_apex
