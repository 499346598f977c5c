"""fp32 masters in lists of the user's own, and the copies to and from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_apex import ops


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Makes fp32 masters of a half model's trainable parameters, to give to an optimizer.

    Args:
        model: The model; its parameters may differ in dtype.
        flat_master: Whether the masters are one long vector instead of a tensor a parameter.

    Returns:
        The model's trainable parameters, and their masters: leaves that require gradients.

    Raises:
        ValueError: If no parameter is trainable, or ``flat_master`` is asked of parameters on several devices.
    """
    model_params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    if not model_params:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True to make a master of.")
    if not flat_master:
        return model_params, [p.detach().to(torch.float32, copy=True).requires_grad_() for p in model_params]
    devices = {param.device for param in model_params}
    if len(devices) > 1:
        raise ValueError(
            f"flat_master=True needs all parameters on one device, they are on {sorted(map(str, devices))}: "
            "use flat_master=False."
        )
    flat = torch.cat([param.detach().float().reshape(-1) for param in model_params])
    return model_params, [flat.requires_grad_()]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of half parameters to their masters, as fp32.

    A parameter without a gradient leaves its master without one; in a flat master its part is 0.

    Args:
        model_params: The first list of `prep_param_lists`.
        master_params: The second.
        flat_master: As it was given to `prep_param_lists`.
    """
    _check_lists(model_params, master_params, flat_master)
    if flat_master:
        flat = master_params[0]
        if flat.grad is None:
            flat.grad = torch.empty_like(flat)
        for param, part in zip(model_params, _parts(model_params, flat.grad), strict=True):
            part.zero_() if param.grad is None else part.copy_(param.grad)
        return
    wide, half = [], []
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        wide.append(master.grad)
        half.append(param.grad)
    _copy(wide, half)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Rounds masters into the model's parameters.

    Args:
        model_params: The first list of `prep_param_lists`.
        master_params: The second.
        flat_master: As it was given to `prep_param_lists`.
    """
    _check_lists(model_params, master_params, flat_master)
    halves = [param.detach() for param in model_params]
    if flat_master:
        for half, part in zip(halves, _parts(model_params, master_params[0].detach()), strict=True):
            half.copy_(part)
        return
    _copy(halves, [master.detach() for master in master_params])


def to_python_float(t: Any) -> float:
    """The number in a one-element tensor or list."""
    return float(t.item() if hasattr(t, "item") else t[0])


def _copy(dst: list[Tensor], src: list[Tensor]) -> None:
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for to, of in zip(dst, src, strict=True):
        lists = by_device.setdefault(to.device, ([], []))
        lists[0].append(to)
        lists[1].append(of)
    with torch.no_grad():
        for to_list, of_list in by_device.values():
            ops.copy_scaled_(to_list, of_list)


def _parts(model_params: Sequence[Tensor], flat: Tensor) -> Iterator[Tensor]:
    for param, part in zip(model_params, flat.split([p.numel() for p in model_params]), strict=True):
        yield part.view(param.shape)


def _check_lists(model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool) -> None:
    if flat_master:
        fits = len(master_params) == 1 and master_params[0].numel() == sum(p.numel() for p in model_params)
    else:
        shapes = [p.shape for p in master_params]
        fits = [p.shape for p in model_params] == shapes
    if not fits:
        raise ValueError(
            f"master_params ({len(master_params)}) do not belong to model_params ({len(model_params)}) with "
            f"flat_master={flat_master}: give both lists as prep_param_lists returned them, and the same flat_master."
        )
