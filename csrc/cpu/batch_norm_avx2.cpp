// The batch norm kernels for AVX2.
#if defined(__x86_64__)
#define APEX_ISA avx2
#define APEX_VECTOR_BYTES 32
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
const BatchNormKernels& batch_norm_kernels_avx2(c10::ScalarType dtype) { return avx2::batch_norm_table(dtype); }
}  // namespace lightning_apex
#endif
