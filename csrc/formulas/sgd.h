// Stochastic gradient descent with momentum, dampening and Nesterov's form (Sutskever et al. 2013), as torch.optim.SGD:
//
//   g <- g + wd p          (wd_after_momentum: the decay is added to the step instead of to the gradient)
//   b <- momentum b + (1 - dampening) g      (at a parameter's first step: b <- g)
//   p <- p - lr (nesterov ? g + momentum b : b)
#pragma once

#include "common.h"

namespace lightning_apex {

template <bool with_momentum>
struct SGDFormula : ElementWise {
  static constexpr int n_state = with_momentum ? 1 : 0;
  static constexpr int n_hyper = 7;
  static constexpr const char* name() { return with_momentum ? "sgd_momentum" : "sgd"; }
  static constexpr const char* state_name(int) { return "momentum_buffer"; }
  enum Hyper { lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, maximize };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr",       "momentum",          "dampening", "weight_decay",
                                            "nesterov", "wd_after_momentum", "maximize"};
    return names[i];
  }

  template <class S>
  struct Consts {
    S lr, old_weight, new_weight, grad_weight, buffer_weight, l2_before, l2_after, sign;
  };

  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double step) {
    const bool first = step <= 1, late_decay = h[wd_after_momentum] != 0, look_ahead = h[nesterov] != 0;
    Consts<S> c;
    c.lr = S(h[lr]);
    c.old_weight = S(first ? 0 : h[momentum]);
    c.new_weight = S(first ? 1 : 1 - h[dampening]);
    c.grad_weight = S(!with_momentum || look_ahead ? 1 : 0);
    c.buffer_weight = S(!with_momentum ? 0 : look_ahead ? h[momentum] : 1);
    c.l2_before = S(late_decay ? 0 : h[weight_decay]);
    c.l2_after = S(late_decay ? h[weight_decay] : 0);
    c.sign = S(h[maximize] != 0 ? -1 : 1);
    return c;
  }

  template <class T>
  static APEX_HD void update(T& p, T g, T (&s)[n_state > 0 ? n_state : 1], const Consts<scalar_of<T>>& c) {
    g = g * c.sign + p * c.l2_before;
    T d = g;
    if constexpr (with_momentum) {
      s[0] = s[0] * c.old_weight + g * c.new_weight;
      d = g * c.grad_weight + s[0] * c.buffer_weight;
    }
    p = p - (d + p * c.l2_after) * c.lr;
  }
};

}  // namespace lightning_apex
