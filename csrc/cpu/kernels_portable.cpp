// The kernels for whatever the compiler's default target has (SSE2 on x86-64).
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"

#define APEX_ISA portable
#define APEX_VECTOR_BYTES 16
// clang-format off
#include "../formulas/common.h"
#include "vec.h"
#include "../optimizers.h"
#include "kernels.h"
#include "step_kernels.h"
#include "kernel_tables.h"
// clang-format on

namespace lightning_apex {
const Backend kPortableBackend = {"portable",
                                  &portable::measure_kernel,
                                  &portable::magnitude_kernel,
                                  &portable::copy_kernel,
                                  &portable::reconcile_kernel,
                                  &portable::step_kernel,
                                  &portable::gather_kernel};
}  // namespace lightning_apex
