// Adagrad (Duchi, Hazan & Singer 2011), as torch.optim.Adagrad with lr_decay = 0:
//
//   g <- g + wd p                      (with adagrad_w: p <- p - lr wd p instead)
//   sum <- sum + g^2
//   p <- p - lr g / (sqrt(sum) + eps)
#pragma once

#include "common.h"

namespace lightning_apex {

struct AdagradFormula : ElementWise {
  static constexpr int n_state = 1;
  static constexpr int n_hyper = 5;
  static constexpr const char* name() { return "adagrad"; }
  static constexpr const char* state_name(int) { return "sum"; }
  enum Hyper { lr, eps, weight_decay, adagrad_w_mode, maximize };
  static constexpr const char* hyper_name(int i) {
    constexpr const char* names[n_hyper] = {"lr", "eps", "weight_decay", "adagrad_w_mode", "maximize"};
    return names[i];
  }

  template <class S>
  struct Consts {
    S lr, eps, decay, l2, sign;
  };

  template <class S>
  static APEX_HD Consts<S> prepare(const double* h, double) {
    const bool decoupled = h[adagrad_w_mode] != 0;
    Consts<S> c;
    c.lr = S(h[lr]);
    c.eps = S(h[eps]);
    c.decay = S(decoupled ? 1 - h[lr] * h[weight_decay] : 1);
    c.l2 = S(decoupled ? 0 : h[weight_decay]);
    c.sign = S(h[maximize] != 0 ? -1 : 1);
    return c;
  }

  template <class T>
  static APEX_HD void update(T& p, T g, T (&s)[n_state], const Consts<scalar_of<T>>& c) {
    g = g * c.sign + p * c.l2;
    p = p * c.decay;
    s[0] = s[0] + g * g;
    p = p - g / (square_root(s[0]) + c.eps) * c.lr;
  }
};

}  // namespace lightning_apex
