// The kernels for AVX2 with FMA and F16C.
//
// Everything that others may share is included first, for the default target: a standard library function compiled
// for this instruction set could be picked by the linker for all.
#if defined(__x86_64__)
#include <immintrin.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define APEX_ISA avx2
#define APEX_VECTOR_BYTES 32
// clang-format off
#include "../formulas/common.h"
#include "vec.h"
#include "../optimizers.h"
#include "kernels.h"
#include "step_kernels.h"
#include "kernel_tables.h"
// clang-format on

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

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
