// A second, shorter way from Python to the operators that take lists of tensors.
#pragma once

#include <pybind11/pybind11.h>

namespace lightning_apex {

// Adds them to the module under the operators' names. They do what torch.ops.lightning_apex does, in half the time for
// many small tensors: it boxes the lists, and takes Python's lock for every tensor to let go of it. The compiler
// (torch.compile) can follow that way only.
void bind_calls(pybind11::module_& m);

}  // namespace lightning_apex
