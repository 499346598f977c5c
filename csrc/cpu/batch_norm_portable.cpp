// The batch norm kernels for whatever the compiler's default target has.
#define APEX_ISA portable
#define APEX_VECTOR_BYTES 16
// clang-format off
#include "batch_norm_backend.h"
#include "isa_begin.h"
#include "vec.h"
#include "kernels.h"
#include "batch_norm_lanes.h"
#include "batch_norm_runs.h"
#include "batch_norm_rows.h"
#include "batch_norm_kernels.h"
#include "isa_end.h"
// clang-format on

namespace lightning_apex {
const BatchNormKernels& batch_norm_kernels_portable(c10::ScalarType dtype) { return portable::batch_norm_table(dtype); }
}  // namespace lightning_apex
