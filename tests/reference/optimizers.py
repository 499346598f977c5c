"""One update of one float64 tensor. Each function returns the new parameter and the new states."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Hypers = dict[str, float]
Update = Callable[[Tensor, Tensor, list[Tensor], int, Hypers], tuple[Tensor, list[Tensor]]]


def adam(p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    """Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; Reddi et al. 2018 with a third state."""
    b1, b2 = h["beta1"], h["beta2"]
    if h["maximize"]:
        g = -g
    if h["adam_w_mode"]:
        p = p - h["lr"] * h["weight_decay"] * p
    else:
        g = g + h["weight_decay"] * p
    m = b1 * states[0] + (1 - b1) * g
    v = b2 * states[1] + (1 - b2) * g.square()
    new_states = [m, v]
    second = v
    if len(states) == 3:
        second = states[2].maximum(v)
        new_states.append(second)
    if h["bias_correction"]:
        m, second = m / (1 - b1**t), second / (1 - b2**t)
    return p - h["lr"] * m / (second.sqrt() + h["eps"]), new_states


def sgd(p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    """Sutskever et al. 2013, with dampening, in torch's form: the learning rate is outside the momentum."""
    if h["maximize"]:
        g = -g
    decay = h["weight_decay"] * p
    if not h["wd_after_momentum"]:
        g = g + decay
    step, new_states = g, []
    if states:
        buffer = g if t == 1 else h["momentum"] * states[0] + (1 - h["dampening"]) * g
        new_states = [buffer]
        step = g + h["momentum"] * buffer if h["nesterov"] else buffer
    if h["wd_after_momentum"]:
        step = step + decay
    return p - h["lr"] * step, new_states


REFERENCES: dict[str, Update] = {"adam": adam, "adam_amsgrad": adam, "sgd": sgd, "sgd_momentum": sgd}
