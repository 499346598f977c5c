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

#include "tensor_facts.h"
#include "tensor_lists.h"

namespace py = pybind11;

namespace lightning_apex {

namespace {

// The tensors of a Python sequence, in the Python objects that keep them alive: these are borrowed, as counting a
// tensor's references up and down again costs more than all else that a small one needs.
class Borrowed {
 public:
  Borrowed(py::handle list, const char* name) {
    const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(list.ptr(), "expected a sequence of tensors"));
    if (!items) throw py::error_already_set();
    const size_t n = PySequence_Fast_GET_SIZE(items.ptr());
    PyObject** const objects = PySequence_Fast_ITEMS(items.ptr());
    objects_.reserve(n);
    tensors_.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      if (i + kLookAhead < n) prefetch(objects[i + kLookAhead]);
      PyObject* const object = objects[i];
      if (!THPVariable_Check(object)) {
        let_go();
        TORCH_CHECK_TYPE(false, name, "[", i, "] is ", Py_TYPE(object)->tp_name, "; expected a Tensor");
      }
      Py_INCREF(object);
      objects_.push_back(object);
      tensors_.push_back(Borrow::createBorrow(THPVariable_Unpack(object)));
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() { let_go(); }
  operator TensorList() const { return tensors_; }
  PyObject* object(size_t i) const { return objects_[i]; }

 private:
  using Borrow = c10::MaybeOwnedTraits<Tensor>;
  void let_go() {
    for (Tensor& t : tensors_) Borrow::destroyBorrow(t);
    for (size_t i = 0; i < objects_.size(); ++i) {
      if (i + kLookAhead < objects_.size()) prefetch(objects_[i + kLookAhead]);
      Py_DECREF(objects_[i]);
    }
  }
  std::vector<PyObject*> objects_;
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

// What a plan of an update depends on in a parameter: its dtype and device, and the kind of gradient it has.
uint32_t kind_of(const Tensor& param, const Tensor& grad) {
  const at::Device device = param.device();
  const uint32_t of_grad = !grad.defined() ? 0 : grad.layout() == at::kStrided ? 1 : 2;
  return of_grad << 24 | uint32_t(uint8_t(device.index())) << 16 | uint32_t(uint8_t(device.type())) << 8 |
         uint32_t(uint8_t(param.scalar_type()));
}

// A subclass may have a gradient of its own making.
py::object grad_of(PyObject* param, const Tensor& tensor) {
  if (THPVariable_CheckExact(param)) return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.grad()));
  return py::reinterpret_borrow<py::object>(param).attr("grad");
}

std::pair<py::list, py::bytes> gradients_of(py::handle params) {
  HANDLE_TH_ERRORS
  const Borrowed borrowed(params, "params");
  const TensorList tensors = borrowed;
  const size_t n = tensors.size();
  std::vector<uint32_t> kinds(n);
  py::list grads(n);
  for (size_t i = 0; i < n; ++i) {
    prefetch(tensors, i + 3 * kLookAhead);
    if (i + 2 * kLookAhead < n) prefetch(tensors[i + 2 * kLookAhead].unsafeGetTensorImpl()->autograd_meta());
    if (i + kLookAhead < n) prefetch(tensors[i + kLookAhead].unsafeGetTensorImpl()->grad());
    py::object grad = grad_of(borrowed.object(i), tensors[i]);
    kinds[i] = kind_of(tensors[i], grad.is_none() ? Tensor() : THPVariable_Unpack(grad.ptr()));
    PyList_SET_ITEM(grads.ptr(), i, grad.release().ptr());
  }
  return {grads, py::bytes(reinterpret_cast<const char*>(kinds.data()), kinds.size() * sizeof(uint32_t))};
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
  m.def("gradients_of", &gradients_of);
}

}  // namespace lightning_apex
