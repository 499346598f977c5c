// NovoGrad (Ginsburg et al. 2019, algorithm 1): Adam with one second moment a tensor.
//
//   v <- b2 v + (1 - b2) |g|^2         (at a tensor's first step: v <- |g|^2, unless init_zero)
//   d <- sqrt(v / c2) + eps            c_i = 1 - b_i^step, or 1 without bias correction
//   reg_inside_moment:                 m <- b1 m + b3 (g / d + wd p),   p <- p - lr m / c1
//   otherwise:                         m <- b1 m + b3 g,                p <- p - lr ((m / c1) / d + wd p)
//
// b3 = 1 - b1, or 1 without grad_averaging. With another norm_type than 2, v blends max |g| in place of |g|^2, and
// d <- v / c2 + eps.
#pragma once

#include "common.h"

namespace lightning_apex {

struct NovoGradFormula : WithNorms {
  static constexpr int n_state = 1;
  static constexpr int n_hyper = 11;
  static constexpr int n_norms = 1;
  static constexpr int n_tensor_state = 1;
  static constexpr bool gathers_param = false;
  static constexpr const char* name() { return "novograd"; }
  static constexpr const char* state_name(int) { return "exp_avg"; }
  static constexpr const char* tensor_state_name(int) { return "exp_avg_sq"; }
  enum Hyper {
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias_correction,
    grad_averaging,
    reg_inside_moment,
    norm_type,
    init_zero,
    maximize
  };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr",           "beta1",           "beta2",          "eps",
                                            "weight_decay", "bias_correction", "grad_averaging", "reg_inside_moment",
                                            "norm_type",    "init_zero",       "maximize"};
    return names[i];
  }
  static APEX_HD bool takes_maxima(const double* h) { return h[norm_type] != 2; }

  template <class S>
  struct Consts {
    S beta1, grad_weight, param_weight, step_size, decay;
    double inv_c2;
  };

  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double step) {
    Consts<S> c;
    c.beta1 = S(h[beta1]);
    c.step_size = S(h[lr] / (h[bias_correction] != 0 ? 1 - pow(h[beta1], step) : 1));
    c.inv_c2 = h[bias_correction] != 0 ? 1 / (1 - pow(h[beta2], step)) : 1;
    c.decay = S(h[reg_inside_moment] != 0 ? 1 : 1 - h[lr] * h[weight_decay]);
    return c;
  }

  template <class S>
  static APEX_HD void finish(const double* h, double step, const double* norms, double* tensor_state, Consts<S>& c) {
    double& v = *tensor_state;
    v = step <= 1 && h[init_zero] == 0 ? norms[0] : h[beta2] * v + (1 - h[beta2]) * norms[0];
    const double corrected = v * c.inv_c2;
    const double d = (takes_maxima(h) ? corrected : sqrt(corrected)) + h[eps];
    const double beta3 = h[grad_averaging] != 0 ? 1 - h[beta1] : 1, sign = h[maximize] != 0 ? -1 : 1;
    const bool inside = h[reg_inside_moment] != 0;
    c.grad_weight = S(beta3 * sign / (inside ? d : 1));
    c.param_weight = S(inside ? beta3 * h[weight_decay] : 0);
    if (!inside) c.step_size = S(double(c.step_size) / d);
  }

  template <class T>
  static APEX_HD void gather(T, T g, const T (&)[n_state], const Consts<scalar_of<T>>&, T (&x)[n_norms]) {
    x[0] = g;
  }

  template <class T>
  static APEX_HD void update(T& p, T g, T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    s[0] = s[0] * c.beta1 + g * c.grad_weight + p * c.param_weight;
    p = p * c.decay - s[0] * c.step_size;
  }
};

}  // namespace lightning_apex
