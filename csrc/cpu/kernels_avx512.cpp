// The kernels for AVX-512 (F, BW, VL, DQ).
//
// Everything that others may share is included first, for the default target: a standard library function compiled
// for this instruction set could be picked by the linker for all.
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own intrinsics leave unused lanes undefined
#include <immintrin.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#define APEX_ISA avx512
#define APEX_VECTOR_BYTES 64
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
const Backend kAvx512Backend = {"avx512",
                                &avx512::measure_kernel,
                                &avx512::magnitude_kernel,
                                &avx512::copy_kernel,
                                &avx512::reconcile_kernel,
                                &avx512::step_kernel,
                                &avx512::gather_kernel};
}  // namespace lightning_apex
#endif
