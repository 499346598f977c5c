// The kernels for AVX2.
#if defined(__x86_64__)
#define APEX_ISA avx2
#define APEX_VECTOR_BYTES 32
// clang-format off
#include "isa_begin.h"
#include "../formulas/common.h"
#include "vec.h"
#include "../optimizers.h"
#include "kernels.h"
#include "step_kernels.h"
#include "kernel_tables.h"
#include "isa_end.h"
// clang-format on

namespace lightning_apex {
const Backend kAvx2Backend = {"avx2",
                              &avx2::measure_kernel,
                              &avx2::magnitude_kernel,
                              &avx2::copy_kernel,
                              &avx2::reconcile_kernel,
                              &avx2::step_kernel,
                              &avx2::gather_kernel};
}  // namespace lightning_apex
#endif
