"""One update of one float64 tensor. Each function returns the new parameter and the new states.

`stored(state, k)` gives the k-th new state with what storing it has rounded away; only LAMB computes with that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Hypers = dict[str, float]
Update = Callable[..., tuple[Tensor, list[Tensor]]]
Stored = Callable[[Tensor, int], Tensor]


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


def adagrad(p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    """Duchi, Hazan & Singer 2011, with eps outside the root; the decay joins the gradient or the update."""
    if h["maximize"]:
        g = -g
    if not h["adagrad_w_mode"]:
        g = g + h["weight_decay"] * p
    total = states[0] + g.square()
    step = g / (total.sqrt() + h["eps"])
    if h["adagrad_w_mode"]:
        step = step + h["weight_decay"] * p
    return p - h["lr"] * step, [total]


def lion(p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    """Chen et al. 2023, algorithm 2."""
    if h["maximize"]:
        g = -g
    blend = h["beta1"] * states[0] + (1 - h["beta1"]) * g
    direction = torch.where(blend.isnan(), blend, blend.sign())
    p = p - h["lr"] * (direction + h["weight_decay"] * p)
    return p, [h["beta2"] * states[0] + (1 - h["beta2"]) * g]


def lamb_direction(
    p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers, stored: Stored
) -> tuple[Tensor, list[Tensor]]:
    """The update of You et al. 2020 before it is scaled, and the new states."""
    b1, b2 = h["beta1"], h["beta2"]
    if h["maximize"]:
        g = -g
    if not h["adam_w_mode"]:
        g = g + h["weight_decay"] * p
    m = b1 * states[0] + (1 - b1 if h["grad_averaging"] else 1) * g
    v = b2 * states[1] + (1 - b2) * g.square()
    first, second = stored(m, 0), stored(v, 1)
    if h["bias_correction"]:
        first, second = first / (1 - b1**t), second / (1 - b2**t)
    u = first / (second.sqrt() + h["eps"])
    return u + h["weight_decay"] * p if h["adam_w_mode"] else u, [m, v]


def lamb(
    p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers, stored: Stored = lambda s, k: s
) -> tuple[Tensor, list[Tensor]]:
    """You et al. 2020, algorithm 2, with phi(z) = z; layers that are not decayed are scaled with use_nvlamb only."""
    u, states = lamb_direction(p, g, states, t, h, stored)
    w_norm, u_norm = p.norm(), u.norm()
    ratio = 1.0
    if (h["weight_decay"] or h["use_nvlamb"]) and w_norm != 0 and u_norm != 0:
        ratio = w_norm / u_norm
    return p - h["lr"] * ratio * u, states


def novograd(p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    """Ginsburg et al. 2019, algorithm 1: the second moment is one number."""
    b1, b2 = h["beta1"], h["beta2"]
    m, v = states
    largest = g.abs().amax() if g.numel() else g.sum()
    norm = g.square().sum() if h["norm_type"] == 2 else largest
    v = norm if t == 1 and not h["init_zero"] else b2 * v + (1 - b2) * norm
    second = v / (1 - b2**t) if h["bias_correction"] else v
    divisor = (second.sqrt() if h["norm_type"] == 2 else second) + h["eps"]
    if h["maximize"]:
        g = -g
    weight = 1 - b1 if h["grad_averaging"] else 1
    correction = 1 - b1**t if h["bias_correction"] else 1
    if h["reg_inside_moment"]:
        m = b1 * m + weight * (g / divisor + h["weight_decay"] * p)
        return p - h["lr"] * m / correction, [m, v]
    m = b1 * m + weight * g
    return p - h["lr"] * (m / correction / divisor + h["weight_decay"] * p), [m, v]


def lars(p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    """You, Gitman & Ginsburg 2017, algorithm 1, in the form of torch's SGD: the learning rate outside the momentum."""
    w_norm, g_norm = p.norm(), g.norm()
    trust = 1.0
    if w_norm != 0 and g_norm != 0:
        trust = h["trust_coefficient"] * w_norm / (g_norm + h["weight_decay"] * w_norm + h["eps"])
    scaled = h | {"weight_decay": trust * h["weight_decay"]}
    return sgd(p, trust * g, states, t, scaled)


REFERENCES: dict[str, Update] = {
    "adam": adam,
    "adam_amsgrad": adam,
    "sgd": sgd,
    "sgd_momentum": sgd,
    "adagrad": adagrad,
    "lion": lion,
    "lamb": lamb,
    "novograd": novograd,
    "lars": lars,
    "lars_momentum": lars,
}


def norms(name: str, p: Tensor, g: Tensor, states: list[Tensor], t: int, h: Hypers, stored: Stored) -> list[float]:
    """What the first pass over a tensor measures."""
    if name == "lamb":
        of = [p, lamb_direction(p, g, states, t, h, stored)[0]]
    elif name == "novograd" and h["norm_type"] != 2:
        return [g.abs().amax().item() if g.numel() else 0.0]
    else:
        of = [g] if name == "novograd" else [p, g]
    return [x.square().sum().item() for x in of]
