from collections.abc import Sequence
from typing import Any

from torch import Tensor

def build_info() -> dict[str, Any]: ...
def cpu_backend() -> str: ...
def set_cpu_backend(name: str) -> None: ...
def optimizer_table() -> list[dict[str, Any]]: ...
def measure_gradients(grads: Sequence[Tensor], /) -> tuple[Tensor, Tensor]: ...
def unscale_(grads: Sequence[Tensor], multiplier: Tensor, found_inf: Tensor | None, /) -> Tensor: ...
def copy_scaled_(
    dst: Sequence[Tensor], src: Sequence[Tensor], multiplier: Tensor | None, found_inf: Tensor | None, /
) -> Tensor: ...
def reconcile_masters_(masters: Sequence[Tensor], params: Sequence[Tensor], /) -> None: ...
def fused_step_(
    name: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    hypers: Sequence[float],
    lr: Tensor | None,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    norms: Tensor | None,
    /,
) -> None: ...
def fused_norms_(
    name: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    hypers: Sequence[float],
    lr: Tensor | None,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    /,
) -> Tensor: ...
def tensor_norms(tensors: Sequence[Tensor], ord: float, /) -> Tensor: ...
def gradients_of(params: Sequence[Tensor], /) -> tuple[list[Tensor | None], bytes]: ...
