// Lion (Chen et al. 2023, algorithm 2): the sign of a blend of momentum and gradient, with decoupled weight decay.
//
//   p <- p - lr wd p
//   p <- p - lr sign(b1 m + (1 - b1) g)
//   m <- b2 m + (1 - b2) g
#pragma once

#include "common.h"

namespace lightning_apex {

struct LionFormula : ElementWise {
  static constexpr int n_state = 1;
  static constexpr int n_hyper = 5;
  static constexpr const char* name() { return "lion"; }
  static constexpr const char* state_name(int) { return "exp_avg"; }
  enum Hyper { lr, beta1, beta2, weight_decay, maximize };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr", "beta1", "beta2", "weight_decay", "maximize"};
    return names[i];
  }

  template <class S>
  struct Consts {
    S lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, sign;
  };

  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double) {
    Consts<S> c;
    c.lr = S(h[lr]);
    c.beta1 = S(h[beta1]);
    c.one_minus_beta1 = S(1 - h[beta1]);
    c.beta2 = S(h[beta2]);
    c.one_minus_beta2 = S(1 - h[beta2]);
    c.decay = S(1 - h[lr] * h[weight_decay]);
    c.sign = S(h[maximize] != 0 ? -1 : 1);
    return c;
  }

  template <class T>
  static APEX_HD void update(T& p, T g, T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    g = g * c.sign;
    p = p * c.decay - sign_of(s[0] * c.beta1 + g * c.one_minus_beta1) * c.lr;
    s[0] = s[0] * c.beta2 + g * c.one_minus_beta2;
  }
};

}  // namespace lightning_apex
