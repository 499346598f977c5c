// The schemas of the batch norm operators, for every library that registers kernels for them.
#pragma once

#include <torch/library.h>

namespace lightning_apex {

void define_batch_norm_schemas(torch::Library& m);

}  // namespace lightning_apex
