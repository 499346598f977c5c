// Begins the part of a file that is compiled for one instruction set; isa_end.h ends it. The file has said which:
//   APEX_ISA            the namespace of what is compiled for it
//   APEX_VECTOR_BYTES   64: AVX-512 (F, BW, VL, DQ); 32: AVX2 with FMA and F16C; 16: the compiler's default target
//                       (SSE2 on x86-64)
//
// Everything that others may share is included here, for the default target: a standard library function compiled for
// another instruction set could be picked by the linker for all. No include guard: what follows is said once a file.
#if APEX_VECTOR_BYTES == 64
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own intrinsics leave unused lanes undefined
#pragma GCC diagnostic ignored "-Wuninitialized"        // likewise
#endif

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

#include "backend.h"

#if APEX_VECTOR_BYTES == 64 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#elif APEX_VECTOR_BYTES == 64
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#elif APEX_VECTOR_BYTES == 32 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif APEX_VECTOR_BYTES == 32
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
