// What the operators see of the kernels: one table of functions for each instruction set.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../rows.h"

namespace lightning_apex {

struct Measured {
  double sum_of_squares;
  bool nonfinite;
};

// Every function works on the elements [begin, end) of a row. Null where a combination of dtypes is not supported.
using MeasureFn = Measured (*)(const void* src, int64_t begin, int64_t end);
using CopyFn = bool (*)(void* dst, const void* src, double multiplier, int64_t begin, int64_t end);  // any nonfinite?
using ReconcileFn = void (*)(void* master, const void* param, int64_t begin, int64_t end);
// `consts` is the formula's Consts<double> where the parameter is double, else Consts<float>.
using StepFn = void (*)(const StepRow& row, const void* consts, double multiplier, int64_t begin, int64_t end);

// The first pass of an optimizer with norms. norms: the sums of squares, or the largest magnitudes, of these elements.
using GatherFn = void (*)(const StepRow& row, const void* consts, double multiplier, int64_t begin, int64_t end,
                          double* norms);
using MagnitudeFn = double (*)(const void* src, int64_t begin, int64_t end);  // the largest; NaN if any is

struct Backend {
  const char* name;
  MeasureFn (*measure)(ScalarType src);
  MagnitudeFn (*magnitude)(ScalarType src);
  CopyFn (*copy)(ScalarType dst, ScalarType src);
  ReconcileFn (*reconcile)(ScalarType param);
  StepFn (*step)(int optimizer, ScalarType param, ScalarType grad, ScalarType state, bool master);
  GatherFn (*gather)(int optimizer, bool maxima, ScalarType param, ScalarType grad, ScalarType state, bool master);
};

#if defined(__x86_64__)
extern const Backend kAvx512Backend, kAvx2Backend;
#endif
extern const Backend kPortableBackend;

// The larger of two magnitudes; NaN where one is.
inline double larger(double a, double b) { return b > a || b != b ? b : a; }

// The one that runs: the best that this processor has, or what LIGHTNING_APEX_CPU_BACKEND asks for.
const Backend& cpu_backend();
std::vector<std::string> cpu_backends();        // those that can run here, best first
void set_cpu_backend(const std::string& name);  // for tests; not while an operator runs

}  // namespace lightning_apex
