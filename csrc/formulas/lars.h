// LARS (You, Gitman & Ginsburg 2017, algorithm 1): momentum SGD whose gradients a tensor's trust ratio scales.
//
//   t <- coefficient |p| / (|g| + wd |p| + eps)      (1 where |p| or |g| is 0)
//   g <- t (g + wd p)      (wd_after_momentum: t wd p is added to the step instead of to the gradient)
//   b <- momentum b + (1 - dampening) g      (at a parameter's first step: b <- g)
//   p <- p - lr (nesterov ? g + momentum b : b)
//
// The learning rate is outside the momentum, as in torch.optim.SGD: the paper has it inside, which is the same as long
// as it does not change.
#pragma once

#include "common.h"

namespace lightning_apex {

template <bool with_momentum>
struct LarsFormula : WithNorms {
  static constexpr int n_state = with_momentum ? 1 : 0, n_slots = n_state > 0 ? n_state : 1;
  static constexpr int n_hyper = 9;
  static constexpr int n_norms = 2;
  static constexpr const char* name() { return with_momentum ? "lars_momentum" : "lars"; }
  static constexpr const char* state_name(int) { return "momentum_buffer"; }
  enum Hyper { lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, trust_coefficient, eps, maximize };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr",       "momentum",          "dampening",         "weight_decay",
                                            "nesterov", "wd_after_momentum", "trust_coefficient", "eps",
                                            "maximize"};
    return names[i];
  }

  template <class S>
  struct Consts {
    S lr, old_weight, new_weight, grad_weight, buffer_weight, trust, l2_before, l2_after;
  };

  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double step) {
    const bool first = step <= 1, look_ahead = h[nesterov] != 0;
    Consts<S> c;
    c.lr = S(h[lr]);
    c.old_weight = S(first ? 0 : h[momentum]);
    c.new_weight = S(first ? 1 : 1 - h[dampening]);
    c.grad_weight = S(!with_momentum || look_ahead ? 1 : 0);
    c.buffer_weight = S(!with_momentum ? 0 : look_ahead ? h[momentum] : 1);
    return c;
  }

  template <class S>
  static APEX_HD void finish(const double* h, double, const double* norms, double*, Consts<S>& c) {
    const double of_param = sqrt(norms[0]), of_grad = sqrt(norms[1]);
    double trust = 1;
    if (of_param != 0 && of_grad != 0)
      trust = h[trust_coefficient] * of_param / (of_grad + h[weight_decay] * of_param + h[eps]);
    const bool late_decay = h[wd_after_momentum] != 0;
    c.trust = S(h[maximize] != 0 ? -trust : trust);
    c.l2_before = S(late_decay ? 0 : trust * h[weight_decay]);
    c.l2_after = S(late_decay ? trust * h[weight_decay] : 0);
  }

  template <class T>
  static APEX_HD void gather(T p, T g, const T (&)[n_slots], const Consts<scalar_of<T>>&, T (&x)[n_norms]) {
    x[0] = p;
    x[1] = g;
  }

  template <class T>
  static APEX_HD void update(T& p, T g, T (&s)[n_slots], const Consts<scalar_of<T>>& c) {
    g = g * c.trust + p * c.l2_before;
    T d = g;
    if constexpr (with_momentum) {
      s[0] = s[0] * c.old_weight + g * c.new_weight;
      d = g * c.grad_weight + s[0] * c.buffer_weight;
    }
    p = p - (d + p * c.l2_after) * c.lr;
  }
};

}  // namespace lightning_apex
