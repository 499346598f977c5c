// The kernels for AVX-512.
#if defined(__x86_64__)
#define APEX_ISA avx512
#define APEX_VECTOR_BYTES 64
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
const Backend kAvx512Backend = {"avx512",
                                &avx512::measure_kernel,
                                &avx512::magnitude_kernel,
                                &avx512::copy_kernel,
                                &avx512::reconcile_kernel,
                                &avx512::step_kernel,
                                &avx512::gather_kernel};
}  // namespace lightning_apex
#endif
