"""The fp32 value of each half tensor of a cast module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex import ops
from lightning_apex.casting import HALF


class MasterWeights:
    """Maps half parameters and buffers to their fp32 masters.

    A master counts only where its half tensor equals it, rounded. Elsewhere somebody wrote to the model (an
    exponential average, a user, a loaded state), and the model's value becomes the master: `reconcile`.
    """

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self.version = 0  # goes up when a half tensor gets another master

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._of))

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._of

    def put(self, half: Tensor, master: Tensor) -> None:
        """Makes ``master`` (fp32, same shape) the master of ``half``."""
        self._of[half] = master
        self.version += 1

    def of(self, half: Tensor) -> Tensor:
        """The master of a half tensor, on the tensor's device; made on demand from the half value."""
        master = self._of.get(half)
        if master is None:
            master = half.detach().float()
            self.put(half, master)
        elif master.device != half.device:
            master.data = master.data.to(half.device)
        return master

    def get(self, half: Tensor) -> Tensor | None:
        """The reconciled master of a tensor, or ``None`` where it has none or is no longer half."""
        if half not in self._of or half.dtype not in HALF:
            return None
        self.reconcile([half])
        return self._of[half]

    def reconcile(self, halves: Sequence[Tensor]) -> None:
        """Takes values written to the model since the last step over into the masters of these tensors."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for half in halves:
            by_device.setdefault(half.device, []).append(half)
        with torch.no_grad():
            for group in by_device.values():
                ops.reconcile_masters_([self.of(half) for half in group], [half.detach() for half in group])

    def write(self, halves: Sequence[Tensor]) -> None:
        """Rounds masters into their half tensors."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for half in halves:
            by_device.setdefault(half.device, []).append(half)
        with torch.no_grad():
            for group in by_device.values():
                ops.copy_scaled_([half.detach() for half in group], [self.of(half) for half in group])

    def clear(self) -> None:
        """Forgets all masters: the half values are all there is from now on."""
        self._of.clear()
        self.version += 1

    @contextmanager
    def swapped_into(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the masters stand in for half parameters in an optimizer's groups and state.

        Their ``grad`` is the parameter's, in fp32. On the way out the updated masters are rounded into the parameters.
        For optimizers that know nothing of masters; whatever happens inside, the groups are as before afterwards.
        """
        swap = MasterSwap(self, optimizer)
        handle = before_post_hooks(optimizer, lambda *_: swap.leave())
        try:
            yield
        finally:
            swap.leave()
            if handle is not None:
                handle.remove()
        swap.check()


class MasterSwap:
    """Masters in their parameters' places in an optimizer, from now until `leave`; see `MasterWeights.swapped_into`."""

    def __init__(self, masters: MasterWeights, optimizer: Optimizer) -> None:
        halves = [p for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF]
        self._pairs = [(p, masters.of(p)) for p in halves]
        self._masters, self._optimizer = masters, optimizer
        self._bypassed: bool | None = None  # whether parameters were found written, once left
        masters.reconcile(halves)
        self._versions = [param._version for param in halves]
        for param, master in self._pairs:
            if getattr(optimizer, "wrapped_fused", None) is None:  # which keeps its state as it was asked to
                widen_state(optimizer.state.get(param, {}), param)
            master.requires_grad_(param.requires_grad)
            master.grad = None if param.grad is None else param.grad.float()
        _replace(optimizer, dict(self._pairs))

    def leave(self) -> None:
        """Puts the parameters back, with the updated masters rounded into them; again does nothing."""
        if self._bypassed is not None:
            return
        pairs = self._pairs
        self._bypassed = any(p._version != version for (p, _), version in zip(pairs, self._versions, strict=True))
        _replace(self._optimizer, {master: param for param, master in pairs})
        for param, master in pairs:
            if master.grad is None:  # cleared meanwhile
                param.grad = None
            master.grad = None
            master.requires_grad_(False)
        if not self._bypassed:
            self._masters.write([param for param, _ in pairs])

    def check(self) -> None:
        """Raises RuntimeError if the step went past the masters."""
        if self._bypassed:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step() updated half parameters that its param_groups did not hold, "
                "past their fp32 masters: let an optimizer that wraps another share its param_groups, or use O1 or O4."
            )


def before_post_hooks(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle | None:
    """Runs a hook after each step, before the user's own: these must meet parameters in their places."""
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # a wrapper that never called Optimizer.__init__
        return None
    handle = optimizer.register_step_post_hook(hook)
    cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)
    return handle


def widen_state(state: dict[str, Any], half: Tensor) -> None:
    """Makes fp32 of state that an optimizer created in its constructor, like its half parameter."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in HALF and value.shape == half.shape:
            state[name] = value.float()


def _replace(optimizer: Optimizer, stand_in: dict[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [stand_in.get(p, p) for p in group["params"]]
    for old, new in stand_in.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Gives a parameter or buffer other memory of another dtype; its gradient follows in dtype."""
    grad, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
    tensor.data = data
    if not tensor.requires_grad:
        return
    match_grad_dtype(tensor)
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def match_grad_dtype(tensor: Tensor) -> None:
    """Makes a leaf accumulate gradients of its own dtype, whatever was asked of it before."""
    if tensor.grad_dtype is not tensor.dtype:
        tensor.grad_dtype = tensor.dtype
