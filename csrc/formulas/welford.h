// Means and sums of squared deviations that can be combined: of lanes, threads, blocks and ranks alike (Welford 1962;
// Chan, Golub & LeVeque 1983, the pairwise rule).
#pragma once

#include "common.h"

namespace lightning_apex {

struct Moments {
  double mean, m2, count;  // m2: the sum of (x - mean)^2
};

// What joining moments of these counts takes, the same for every channel.
struct Joint {
  double count, share, cross;
};
APEX_HD Joint joint(double a_count, double b_count) {
  const double count = a_count + b_count, share = b_count / count;
  return {count, share, a_count * share};
}

// `a` and `b` counted together.
APEX_HD Moments combine(const Moments& a, const Moments& b, const Joint& j) {
  const double delta = b.mean - a.mean;
  return {a.mean + delta * j.share, a.m2 + b.m2 + delta * delta * j.cross, j.count};
}
APEX_HD Moments combine(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  return combine(a, b, joint(a.count, b.count));
}

// Of `count` elements, given the sums of d and d^2, d = x - pivot. What cancels here is bounded by count / k where the
// pivot is the mean of k of the elements: whatever their mean, it is harmless.
APEX_HD Moments moments_of_sums(double pivot, double sum, double sum_of_squares, double count) {
  const double shift = sum / count, m2 = sum_of_squares - sum * shift;
  return {pivot + shift, m2 < 0 ? 0 : m2, count};  // a NaN stays
}

}  // namespace lightning_apex
