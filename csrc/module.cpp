// lightning_apex._C: what the build was made of, and the operators' schemas. The operators themselves are reached
// through torch.ops.lightning_apex; their kernels register themselves in cpu/ and cuda/.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include "cpu/backend.h"
#include "optimizer_table.h"
#include "python_calls.h"
#include "schemas.h"

namespace py = pybind11;

namespace lightning_apex {

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

py::dict build_info() {
  py::dict info;
  info["version"] = LIGHTNING_APEX_VERSION;
  info["torch_version"] = LIGHTNING_APEX_TORCH_VERSION;
  info["compiler"] = compiler();
#if defined(LIGHTNING_APEX_WITH_CUDA)
  info["cuda_version"] = LIGHTNING_APEX_CUDA_VERSION;
  info["cuda_archs"] = LIGHTNING_APEX_CUDA_ARCHS;
#else
  info["cuda_version"] = py::none();
  info["cuda_archs"] = py::str("");
#endif
  info["cpu_backends"] = cpu_backends();
  return info;
}

py::list describe_optimizers() {
  py::list rows;
  for (const OptimizerInfo& info : optimizer_table()) {
    py::dict row;
    row["name"] = info.name;
    row["states"] = info.states;
    row["tensor_states"] = info.tensor_states;
    row["n_norms"] = info.n_norms;
    row["hypers"] = info.hypers;
    rows.append(row);
  }
  return rows;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of lightning_apex: see lightning_apex.ops.";
  m.def("build_info", &build_info);
  m.def("cpu_backend", [] { return cpu_backend().name; });
  m.def("set_cpu_backend", &set_cpu_backend);
  m.def("optimizer_table", &describe_optimizers);
  bind_calls(m);
}

TORCH_LIBRARY(lightning_apex, m) { define_schemas(m); }
TORCH_LIBRARY_IMPL(lightning_apex, CompositeExplicitAutograd, m) { implement_calls_without_tensors(m); }

}  // namespace lightning_apex
