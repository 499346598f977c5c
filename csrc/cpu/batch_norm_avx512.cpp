// The batch norm kernels for AVX-512 (F, BW, VL, DQ).
//
// Everything that others may share is included first, for the default target, as in kernels_avx512.cpp.
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own intrinsics leave unused lanes undefined
#pragma GCC diagnostic ignored "-Wuninitialized"        // likewise
#include <immintrin.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"
#include "batch_norm_backend.h"

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
#include "vec.h"
#include "kernels.h"
#include "batch_norm_lanes.h"
#include "batch_norm_runs.h"
#include "batch_norm_rows.h"
#include "batch_norm_kernels.h"
// clang-format on

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace lightning_apex {
const BatchNormKernels& batch_norm_kernels_avx512(c10::ScalarType dtype) { return avx512::batch_norm_table(dtype); }
}  // namespace lightning_apex
#endif
