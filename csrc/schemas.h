// The operators' schemas, in one place: every library that registers kernels for them defines them from here.
#pragma once

#include <torch/library.h>

namespace lightning_apex {

void define_schemas(torch::Library& m);

// A call without any tensor reaches no device's kernel: it does nothing, and measures nothing. A call with tensors that
// ends up here is for a device that this build has no kernels for. To be registered as CompositeExplicitAutograd.
void implement_calls_without_tensors(torch::Library& m);

}  // namespace lightning_apex
