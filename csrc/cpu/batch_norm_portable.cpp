// The batch norm kernels for whatever the compiler's default target has (SSE2 on x86-64).
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"
#include "batch_norm_backend.h"

#define APEX_ISA portable
#define APEX_VECTOR_BYTES 16
// clang-format off
#include "vec.h"
#include "kernels.h"
#include "batch_norm_lanes.h"
#include "batch_norm_runs.h"
#include "batch_norm_rows.h"
#include "batch_norm_kernels.h"
// clang-format on

namespace lightning_apex {
const BatchNormKernels& batch_norm_kernels_portable(c10::ScalarType dtype) { return portable::batch_norm_table(dtype); }
}  // namespace lightning_apex
