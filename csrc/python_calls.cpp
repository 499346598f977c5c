#include "python_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <vector>

#include "tensor_lists.h"

namespace py = pybind11;

namespace lightning_apex {

namespace {

// The tensors of a Python sequence. A tuple keeps the Python objects alive, and they their tensors: these are borrowed,
// as counting a tensor's references up and down again costs more than all else that a small one needs.
class Borrowed {
 public:
  Borrowed(py::handle list, const char* name)
      : objects_(py::reinterpret_steal<py::tuple>(PySequence_Tuple(list.ptr()))) {
    if (!objects_) throw py::error_already_set();
    const Py_ssize_t n = PyTuple_GET_SIZE(objects_.ptr());
    for (Py_ssize_t i = 0; i < n; ++i)
      TORCH_CHECK_TYPE(THPVariable_Check(object(i)), name, "[", i, "] is ", Py_TYPE(object(i))->tp_name,
                       "; expected a Tensor");
    tensors_.reserve(n);  // nothing throws from here on
    for (Py_ssize_t i = 0; i < n; ++i) tensors_.push_back(Borrow::createBorrow(THPVariable_Unpack(object(i))));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    for (Tensor& t : tensors_) Borrow::destroyBorrow(t);
  }
  operator TensorList() const { return tensors_; }

 private:
  using Borrow = c10::MaybeOwnedTraits<Tensor>;
  PyObject* object(Py_ssize_t i) const { return PyTuple_GET_ITEM(objects_.ptr(), i); }
  py::tuple objects_;
  std::vector<Tensor> tensors_;
};

// Calls an operator through the dispatcher, below autograd: none of them is differentiable. The arguments are the
// caller's, so that they end when Python's lock is held again.
template <class Function, class... Args>
auto call(const c10::TypedOperatorHandle<Function>& op, const Args&... args) {
  const py::gil_scoped_release no_gil;
  const at::AutoDispatchBelowAutograd below;
  return op.call(args...);
}

template <class Function>
c10::TypedOperatorHandle<Function> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

std::tuple<Tensor, Tensor> measure_gradients(py::handle grads) {
  HANDLE_TH_ERRORS
  static const auto op = find<std::tuple<Tensor, Tensor>(TensorList)>("lightning_apex::measure_gradients");
  return call(op, Borrowed(grads, "grads"));
  END_HANDLE_TH_ERRORS_PYBIND
}

Tensor unscale_(py::handle grads, const Tensor& multiplier, const OptionalTensor& found_inf) {
  HANDLE_TH_ERRORS
  using Function = Tensor(TensorList, const Tensor&, const OptionalTensor&);
  static const auto op = find<Function>("lightning_apex::unscale_");
  return call(op, Borrowed(grads, "grads"), multiplier, found_inf);
  END_HANDLE_TH_ERRORS_PYBIND
}

Tensor copy_scaled_(py::handle dst, py::handle src, const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  HANDLE_TH_ERRORS
  using Function = Tensor(TensorList, TensorList, const OptionalTensor&, const OptionalTensor&);
  static const auto op = find<Function>("lightning_apex::copy_scaled_");
  return call(op, Borrowed(dst, "dst"), Borrowed(src, "src"), multiplier, found_inf);
  END_HANDLE_TH_ERRORS_PYBIND
}

void reconcile_masters_(py::handle masters, py::handle params) {
  HANDLE_TH_ERRORS
  static const auto op = find<void(TensorList, TensorList)>("lightning_apex::reconcile_masters_");
  call(op, Borrowed(masters, "masters"), Borrowed(params, "params"));
  END_HANDLE_TH_ERRORS_PYBIND
}

void fused_step_(const std::string& name, py::handle params, py::handle grads, py::handle masters, py::handle states,
                 py::handle steps, const std::vector<double>& hypers, const OptionalTensor& lr,
                 const OptionalTensor& multiplier, const OptionalTensor& found_inf, const OptionalTensor& norms) {
  HANDLE_TH_ERRORS
  using Function =
      void(std::string_view, TensorList, TensorList, TensorList, TensorList, TensorList, at::ArrayRef<double>,
           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);
  static const auto op = find<Function>("lightning_apex::fused_step_");
  call(op, name, Borrowed(params, "params"), Borrowed(grads, "grads"), Borrowed(masters, "masters"),
       Borrowed(states, "states"), Borrowed(steps, "steps"), hypers, lr, multiplier, found_inf, norms);
  END_HANDLE_TH_ERRORS_PYBIND
}

Tensor fused_norms_(const std::string& name, py::handle params, py::handle grads, py::handle masters, py::handle states,
                    py::handle steps, const std::vector<double>& hypers, const OptionalTensor& lr,
                    const OptionalTensor& multiplier, const OptionalTensor& found_inf) {
  HANDLE_TH_ERRORS
  using Function = Tensor(std::string_view, TensorList, TensorList, TensorList, TensorList, TensorList,
                          at::ArrayRef<double>, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);
  static const auto op = find<Function>("lightning_apex::fused_norms_");
  return call(op, name, Borrowed(params, "params"), Borrowed(grads, "grads"), Borrowed(masters, "masters"),
              Borrowed(states, "states"), Borrowed(steps, "steps"), hypers, lr, multiplier, found_inf);
  END_HANDLE_TH_ERRORS_PYBIND
}

Tensor tensor_norms(py::handle tensors, double ord) {
  HANDLE_TH_ERRORS
  static const auto op = find<Tensor(TensorList, double)>("lightning_apex::tensor_norms");
  return call(op, Borrowed(tensors, "tensors"), ord);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

void bind_calls(py::module_& m) {
  m.def("measure_gradients", &measure_gradients);
  m.def("unscale_", &unscale_);
  m.def("copy_scaled_", &copy_scaled_);
  m.def("reconcile_masters_", &reconcile_masters_);
  m.def("fused_step_", &fused_step_);
  m.def("fused_norms_", &fused_norms_);
  m.def("tensor_norms", &tensor_norms);
}

}  // namespace lightning_apex
