"""The rows that tests walk: backends, dtypes, layouts, optimizers. And the one table of tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor

# A "cpu-" row is one instruction set of the CPU kernels; "simt" runs the CUDA kernels on the CPU; "cuda" needs a GPU.
BACKENDS = ["cpu-avx512", "cpu-avx2", "cpu-portable", "simt", "cuda"]

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = [F32, F16, BF16, F64]

# (rtol, atol) of a value stored as this dtype against its float64 reference: a few roundings of the arithmetic for the
# wide types, one rounding of the result for the half types.
TOLERANCES = {F32: (3e-6, 1e-7), F64: (1e-13, 1e-14), F16: (1.1e-3, 1e-7), BF16: (8e-3, 1e-9)}


def combine(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All rows that take one value of each."""
    return list(product(*axes))


def assert_close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Compares with a float64 reference; NaN equals NaN."""
    rtol, atol = TOLERANCES[actual.dtype]
    assert actual.shape == expected.shape, what
    torch.testing.assert_close(
        actual.detach().cpu().double(),
        expected.double(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tells equal from equal bits: -0 from 0, and one NaN from another."""
    flat = [t.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


# ---- layouts: each gives an equal tensor laid out differently, to the last byte of an exact-size storage ----


def _offset(t: Tensor) -> Tensor:
    """Starts one element into its storage: no vector of it is aligned."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def _transposed(t: Tensor) -> Tensor:
    backwards = tuple(reversed(range(t.dim())))
    return t.permute(backwards).contiguous().permute(backwards)


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else _transposed(t)


def _sliced(t: Tensor) -> Tensor:
    """Every second element of a larger tensor, the others NaN: whoever reads or writes them is found out."""
    if t.dim() == 0:
        return t.clone()
    wide = torch.full((*t.shape, 2), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "offset": _offset,
    "transposed": _transposed,
    "channels_last": _channels_last,
    "sliced": _sliced,
}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (31,), (32,), (33,), (7, 0, 3), (5, 13), (2, 3, 4, 5)]
LARGE = (3, 50_001)  # several chunks, and a tail; not for the emulation

# ---- optimizers: hyperparameters by name, as optimizer_table() orders them ----

_ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
_ADAM |= {"adam_w_mode": 1.0, "bias_correction": 1.0, "maximize": 0.0}
_SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
_SGD |= {"nesterov": 0.0, "wd_after_momentum": 0.0, "maximize": 0.0}
_ADAM_ROWS = [
    _ADAM,
    _ADAM | {"weight_decay": 0.1},
    _ADAM | {"weight_decay": 0.1, "adam_w_mode": 0.0},
    _ADAM | {"bias_correction": 0.0, "eps": 1e-3, "maximize": 1.0},
]
_ADAGRAD = {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": 0.0, "maximize": 0.0}
_LION = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "maximize": 0.0}
_LAMB = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "bias_correction": 1.0}
_LAMB |= {"grad_averaging": 1.0, "adam_w_mode": 1.0, "use_nvlamb": 0.0, "maximize": 0.0}
_NOVOGRAD = {"lr": 0.01, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "bias_correction": 1.0}
_NOVOGRAD |= {"grad_averaging": 1.0, "reg_inside_moment": 0.0, "norm_type": 2.0, "init_zero": 0.0, "maximize": 0.0}
_LARS = _SGD | {"trust_coefficient": 0.1, "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZERS: dict[str, list[dict[str, float]]] = {
    "adam": _ADAM_ROWS,
    "adam_amsgrad": _ADAM_ROWS,
    "sgd": [
        _SGD,
        _SGD | {"weight_decay": 0.1},
        _SGD | {"weight_decay": 0.1, "wd_after_momentum": 1.0, "maximize": 1.0},
    ],
    "sgd_momentum": [
        _SGD | {"momentum": 0.9},
        _SGD | {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        _SGD | {"momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.1},
        _SGD | {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": 1.0, "maximize": 1.0},
    ],
    "adagrad": [
        _ADAGRAD,
        _ADAGRAD | {"weight_decay": 0.1},
        _ADAGRAD | {"weight_decay": 0.1, "adagrad_w_mode": 1.0, "maximize": 1.0},
    ],
    "lion": [_LION, _LION | {"weight_decay": 0.1}, _LION | {"beta2": 0.5, "maximize": 1.0}],
    "lamb": [
        _LAMB,
        _LAMB | {"weight_decay": 0.0},
        _LAMB | {"weight_decay": 0.0, "use_nvlamb": 1.0, "grad_averaging": 0.0},
        _LAMB | {"adam_w_mode": 0.0, "bias_correction": 0.0, "eps": 1e-3, "maximize": 1.0},
    ],
    "novograd": [
        _NOVOGRAD,
        _NOVOGRAD | {"reg_inside_moment": 1.0, "grad_averaging": 0.0, "bias_correction": 0.0},
        _NOVOGRAD | {"norm_type": 0.0, "maximize": 1.0},
        _NOVOGRAD | {"init_zero": 1.0, "eps": 1e-2, "reg_inside_moment": 1.0, "maximize": 1.0},
    ],
    "lars": [_LARS, _LARS | {"weight_decay": 0.0, "maximize": 1.0}, _LARS | {"wd_after_momentum": 1.0, "eps": 0.1}],
    "lars_momentum": [
        _LARS | {"momentum": 0.9},
        _LARS | {"momentum": 0.9, "dampening": 0.3, "nesterov": 1.0, "maximize": 1.0},
        _LARS | {"momentum": 0.9, "wd_after_momentum": 1.0},
    ],
}
OPTIMIZER_ROWS = [(name, hypers) for name, rows in OPTIMIZERS.items() for hypers in rows]

# (param, grad, state, has a master): all that the fused step takes.
STEP_DTYPES = [
    (F32, F32, F32, False),
    (F32, F32, BF16, False),
    (F64, F64, F64, False),
    *((half, half, *rest) for half, *rest in product((F16, BF16), (F32, BF16), (False, True))),
    *((half, F32, *rest) for half, *rest in product((F16, BF16), (F32, BF16), (False, True))),
]
