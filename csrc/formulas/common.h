// What every formula may use, on the host and on the device: scalars, and on the host also vectors of them.
//
// A formula is written once, for a type T that is float or double (CUDA, tails of nothing) or a vector of floats or
// doubles (the CPU engine, csrc/cpu/vec.h). It may use + - * /, the functions declared here, and `scalar_of<T>`
// for constants. It never branches on the value of a T; `select` does that lane by lane.
#pragma once

#include <cmath>

#if defined(__CUDACC__) || defined(SIMT_EMU)
#define APEX_HD __host__ __device__ __forceinline__
#else
#define APEX_HD inline __attribute__((always_inline))
#endif

namespace lightning_apex {

// The type of one lane. csrc/cpu/vec.h specialises it for vectors.
template <class T>
struct ScalarOf {
  using type = T;
};
template <class T>
using scalar_of = typename ScalarOf<T>::type;

APEX_HD float square_root(float x) { return sqrtf(x); }
APEX_HD double square_root(double x) { return sqrt(x); }
APEX_HD float maximum(float a, float b) { return a < b ? b : a; }  // a NaN in `a` stays
APEX_HD double maximum(double a, double b) { return a < b ? b : a; }

}  // namespace lightning_apex
