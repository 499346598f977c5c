// Means and sums of squared deviations that can be combined: of lanes, threads, blocks and ranks alike (Welford 1962;
// Chan, Golub & LeVeque 1983, the pairwise rule).
#pragma once

#include "common.h"

namespace lightning_apex {

struct Moments {
  double mean, m2, count;  // m2: the sum of (x - mean)^2
};

// `a` and `b` counted together.
APEX_HD Moments combine(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count, share = b.count / count, delta = b.mean - a.mean;
  return {a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share, count};
}

// Of `count` elements, given the sums of d and d^2, d = x - pivot. What cancels here is bounded by count / k where the
// pivot is the mean of k of the elements: whatever their mean, it is harmless.
APEX_HD Moments moments_of_sums(double pivot, double sum, double sum_of_squares, double count) {
  const double shift = sum / count, m2 = sum_of_squares - sum * shift;
  return {pivot + shift, m2 < 0 ? 0 : m2, count};  // a NaN stays
}

}  // namespace lightning_apex
