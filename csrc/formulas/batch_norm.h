// Batch normalisation of one channel (Ioffe & Szegedy 2015), forward and backward.
//
//   y  = (x - mean) invstd w + b                                invstd = 1 / sqrt(m2 / count + eps)
//   dx = w invstd (dy - sum_dy / count - (x - mean) invstd sum_dy_xhat / count)
//
// Statistics are double. Elements are computed in S, float or double: there, x - mean is exact for an x near the mean,
// and what of the mean S cannot hold goes into the constant term.
#pragma once

#include "welford.h"

namespace lightning_apex {

APEX_HD double inverse_std(const Moments& m, double eps) {
  return 1 / square_root((m.count > 0 ? m.m2 / m.count : 0.0) + eps);
}

// The running mean and variance after `m` was seen; the variance is the unbiased one. Nothing seen changes nothing.
APEX_HD double next_running_mean(double running, const Moments& m, double momentum) {
  return m.count > 0 ? (1 - momentum) * running + momentum * m.mean : running;
}
APEX_HD double next_running_var(double running, const Moments& m, double momentum) {
  const double variance = m.m2 / (m.count > 1 ? m.count - 1 : 1);
  return m.count > 0 ? (1 - momentum) * running + momentum * variance : running;
}

// y = (x - mean) scale + shift
template <class S>
struct Projection {
  S mean, scale, shift;
};

template <class S>
APEX_HD Projection<S> projection(double mean, double invstd, double weight, double bias) {
  const double scale = invstd * weight;
  return {S(mean), S(scale), S(bias - (mean - double(S(mean))) * scale)};
}

// sum_dy_x: of dy (x - S(mean)), as a pass over elements of type S finds it.
template <class S>
APEX_HD double sum_dy_xhat(double sum_dy, double sum_dy_x, double mean, double invstd) {
  return (sum_dy_x - (mean - double(S(mean))) * sum_dy) * invstd;
}

// dx = dy by_dy + (x - mean) by_x + shift
template <class S>
struct GradProjection {
  S mean, by_dy, by_x, shift;
};

template <class S>
APEX_HD GradProjection<S> grad_projection(double mean, double invstd, double weight, double sum_dy, double sum_dy_xhat,
                                          double count) {
  const double by_dy = invstd * weight, per_element = count > 0 ? by_dy / count : 0.0;
  const double by_x = -per_element * invstd * sum_dy_xhat;
  return {S(mean), S(by_dy), S(by_x), S(-per_element * sum_dy - (mean - double(S(mean))) * by_x)};
}

}  // namespace lightning_apex
