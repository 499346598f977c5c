// Adam (Kingma & Ba 2015, algorithm 1), AdamW (Loshchilov & Hutter 2019, algorithm 2) and AMSGrad (Reddi et al. 2018).
//
//   g <- g + wd p                      (Adam; with adam_w: p <- p - lr wd p instead)
//   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
//   p <- p - lr (m / c1) / (sqrt(v / c2) + eps)     c_i = 1 - b_i^step, or 1 without bias correction
//
// eps is added after the bias correction, outside the root, as torch.optim.AdamW does.
#pragma once

#include "common.h"

namespace lightning_apex {

template <bool amsgrad>
struct AdamFormula : ElementWise {
  static constexpr int n_state = amsgrad ? 3 : 2;
  static constexpr int n_hyper = 8;
  static constexpr const char* name() { return amsgrad ? "adam_amsgrad" : "adam"; }
  static constexpr const char* state_name(int i) {
    return i == 0 ? "exp_avg" : i == 1 ? "exp_avg_sq" : "max_exp_avg_sq";
  }
  enum Hyper { lr, beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction, maximize };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr",           "beta1",       "beta2",           "eps",
                                            "weight_decay", "adam_w_mode", "bias_correction", "maximize"};
    return names[i];
  }

  // What is the same for every element of a tensor, computed in double once a tensor.
  template <class S>
  struct Consts {
    S beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_c2, decay, l2, sign;
  };

  // `step` counts this update: 1 at the first.
  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double step) {
    const bool corrected = h[bias_correction] != 0, decoupled = h[adam_w_mode] != 0;
    const double c1 = corrected ? 1 - pow(h[beta1], step) : 1, c2 = corrected ? 1 - pow(h[beta2], step) : 1;
    Consts<S> c;
    c.beta1 = S(h[beta1]);
    c.one_minus_beta1 = S(1 - h[beta1]);
    c.beta2 = S(h[beta2]);
    c.one_minus_beta2 = S(1 - h[beta2]);
    c.eps = S(h[eps]);
    c.step_size = S(h[lr] / c1);
    c.inv_sqrt_c2 = S(1 / sqrt(c2));
    c.decay = S(decoupled ? 1 - h[lr] * h[weight_decay] : 1);
    c.l2 = S(decoupled ? 0 : h[weight_decay]);
    c.sign = S(h[maximize] != 0 ? -1 : 1);
    return c;
  }

  template <class T>
  static APEX_HD void update(T& p, T g, T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    g = g * c.sign + p * c.l2;
    p = p * c.decay;
    s[0] = s[0] * c.beta1 + g * c.one_minus_beta1;
    s[1] = s[1] * c.beta2 + g * g * c.one_minus_beta2;
    T v = s[1];
    if constexpr (amsgrad) v = s[2] = maximum(s[2], v);
    p = p - s[0] / (square_root(v) * c.inv_sqrt_c2 + c.eps) * c.step_size;
  }
};

}  // namespace lightning_apex
