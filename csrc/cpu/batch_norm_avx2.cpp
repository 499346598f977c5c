// The batch norm kernels for AVX2 with FMA and F16C.
//
// Everything that others may share is included first, for the default target, as in kernels_avx2.cpp.
#if defined(__x86_64__)
#include <immintrin.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"
#include "batch_norm_backend.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define APEX_ISA avx2
#define APEX_VECTOR_BYTES 32
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
const BatchNormKernels& batch_norm_kernels_avx2(c10::ScalarType dtype) { return avx2::batch_norm_table(dtype); }
}  // namespace lightning_apex
#endif
