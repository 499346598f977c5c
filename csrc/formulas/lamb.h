// LAMB (You et al. 2020, algorithm 2): Adam's direction, made as long as a tensor's trust ratio says.
//
//   g <- g + wd p                      (only without adam_w)
//   m <- b1 m + b3 g,  v <- b2 v + (1 - b2) g^2      b3 = 1 - b1, or 1 without grad_averaging
//   u <- (m / c1) / (sqrt(v / c2) + eps) [+ wd p with adam_w]      c_i = 1 - b_i^step, or 1 without bias correction
//   p <- p - lr |p| / |u| u            (the ratio is 1 where a norm is 0, and where wd is 0 unless use_nvlamb)
//
// The first pass renews m and v and measures p and u; the second makes u again from m and v as they are stored.
#pragma once

#include "common.h"

namespace lightning_apex {

struct LambFormula : WithNorms {
  static constexpr int n_state = 2;
  static constexpr int n_hyper = 10;
  static constexpr int n_norms = 2;
  static constexpr bool advances_states = true;
  static constexpr const char* name() { return "lamb"; }
  static constexpr const char* state_name(int i) { return i == 0 ? "exp_avg" : "exp_avg_sq"; }
  enum Hyper {
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias_correction,
    grad_averaging,
    adam_w_mode,
    use_nvlamb,
    maximize
  };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr",           "beta1",           "beta2",          "eps",
                                            "weight_decay", "bias_correction", "grad_averaging", "adam_w_mode",
                                            "use_nvlamb",   "maximize"};
    return names[i];
  }

  template <class S>
  struct Consts {
    S beta1, beta3, beta2, one_minus_beta2, eps, inv_c1, inv_sqrt_c2, decay, l2, sign, step_size;
  };

  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double step) {
    const bool corrected = h[bias_correction] != 0, decoupled = h[adam_w_mode] != 0;
    Consts<S> c;
    c.beta1 = S(h[beta1]);
    c.beta3 = S(h[grad_averaging] != 0 ? 1 - h[beta1] : 1);
    c.beta2 = S(h[beta2]);
    c.one_minus_beta2 = S(1 - h[beta2]);
    c.eps = S(h[eps]);
    c.inv_c1 = S(corrected ? 1 / (1 - pow(h[beta1], step)) : 1);
    c.inv_sqrt_c2 = S(corrected ? 1 / sqrt(1 - pow(h[beta2], step)) : 1);
    c.decay = S(decoupled ? h[weight_decay] : 0);
    c.l2 = S(decoupled ? 0 : h[weight_decay]);
    c.sign = S(h[maximize] != 0 ? -1 : 1);
    c.step_size = S(h[lr]);
    return c;
  }

  template <class S>
  static APEX_HD void finish(const double* h, double, const double* norms, double*, Consts<S>& c) {
    const bool scaled = h[weight_decay] != 0 || h[use_nvlamb] != 0;
    const double of_param = sqrt(norms[0]), of_update = sqrt(norms[1]);
    if (scaled && of_param != 0 && of_update != 0) c.step_size = S(h[lr] * (of_param / of_update));
  }

  template <class T>
  static APEX_HD void advance(T p, T g, T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    g = g * c.sign + p * c.l2;
    s[0] = s[0] * c.beta1 + g * c.beta3;
    s[1] = s[1] * c.beta2 + g * g * c.one_minus_beta2;
  }

  template <class T>
  static APEX_HD T direction(T p, const T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    return s[0] * c.inv_c1 / (square_root(s[1]) * c.inv_sqrt_c2 + c.eps) + p * c.decay;
  }

  template <class T>
  static APEX_HD void gather(T p, T, const T (&s)[n_state], const Consts<scalar_of<T>>& c, T (&x)[n_norms]) {
    x[0] = p;
    x[1] = direction(p, s, c);
  }

  template <class T>
  static APEX_HD void update(T& p, T, const T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    p = p - direction(p, s, c) * c.step_size;
  }
};

}  // namespace lightning_apex
