// What every formula may use, on the host and on the device: scalars, and on the host also vectors of them.
//
// A formula is written once, for a type T that is float or double (CUDA, tails of nothing) or a vector of floats or
// doubles (the CPU engine, csrc/cpu/vec.h). It may use + - * /, the functions declared here, and `scalar_of<T>`
// for constants. It never branches on the value of a T.
//
// A formula that is `ElementWise` has these, for the states `s` of one element and hyperparameters `h`:
//
//   prepare(h, step) -> Consts   once a tensor, in double: what is the same for every element
//   update(p, g, s, c)           every element, in one pass over memory
//
// One that is `WithNorms` needs norms of whole tensors first, and makes two passes:
//
//   prepare(h, step) -> Consts
//   first pass, every element:
//     advance(p, g, s, c)        only if `advances_states`: the new states; from here on as they are stored
//     gather(p, g, s, c, x)      x[k] is what norm k is of: the squares are summed, in double
//   finish(h, step, norms, tensor_state, c)
//                                once a tensor, in double: completes `c`, given the sums of x[k]^2 over the tensor, and
//                                renews the states that are one number a tensor
//   second pass, every element:
//     update(p, g, s, c)         with `advances_states` it changes neither `s` nor looks at `g`
#pragma once

#include <cmath>

#if defined(__CUDACC__) || defined(SIMT_EMU)
#define APEX_HD __host__ __device__ __forceinline__
#else
#define APEX_HD inline __attribute__((always_inline))
#endif

namespace lightning_apex {

struct ElementWise {
  static constexpr int n_norms = 0, n_tensor_state = 0;
  static constexpr bool advances_states = false;
};

// What a formula with norms overrides as needed.
struct WithNorms {
  static constexpr int n_tensor_state = 0;        // states of one number a tensor, kept after the others
  static constexpr bool advances_states = false;  // the first pass reads and writes the states, the second only reads
  static constexpr bool gathers_param = true;     // false: the only norm is the gradient's, and nothing else is read
  // Whether norms are the largest magnitudes instead of sums of squares; only where `gathers_param` is false.
  static APEX_HD bool takes_maxima(const double*) { return false; }
};

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
APEX_HD float sign_of(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }  // a zero or a NaN is its own sign
APEX_HD double sign_of(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : x; }

}  // namespace lightning_apex
