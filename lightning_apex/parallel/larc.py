"""Layer-wise adaptive rates around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_apex import ops
from lightning_apex.casting import HALF
from lightning_apex.optimizers._base import FusedOptimizer
from lightning_apex.optimizers._checks import check_number
from lightning_apex.sharding import Place, like_local, local, place_of


class LARC(Optimizer):
    r"""Scales the gradients of each parameter by its trust ratio, around any optimizer: ``LARC(SGD(...))``.

    .. math::
        r = \kappa \frac{\lVert p \rVert}{\lVert g \rVert + \lambda \lVert p \rVert + \epsilon}, \qquad
        g \leftarrow r' (g + \lambda p), \qquad r' = \min(r / \eta, 1) \text{ with clip, } r \text{ without}

    With ``clip`` the wrapped optimizer's learning rate :math:`\eta` is what a parameter gets at most; without,
    :math:`r` scales it as in You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks" (2017). The
    weight decay :math:`\lambda` is that of the wrapped optimizer's groups, for which the wrapper stands in; where a
    norm is 0, :math:`r' = 1` and the decay stays (Apex loses it there, and also for good if a step raises).

    It is an optimizer itself, with the parameter groups, state and state dict of the wrapped one, so that schedulers,
    Lightning and checkpoints need not know. ``param.grad`` is as it was after a step. With loss scaling, gradients are
    unscaled before they get here, by `ApexPrecision`, `LossScaler.step` or ``torch.amp.GradScaler.step``.

    Args:
        optimizer: The optimizer to wrap, fused or torch's. One that decouples its weight decay (AdamW) has it in its
            gradients from now on.
        trust_coefficient: :math:`\kappa`, above 0.
        clip: Whether to limit the learning rate rather than to scale it.
        eps: :math:`\epsilon`.

    Raises:
        TypeError: If ``optimizer`` is no ``torch.optim.Optimizer``.
        ValueError: If an argument is out of range.
    """

    optim: Optimizer
    trust_coefficient: float
    clip: bool
    eps: float

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LARC wraps an optimizer, and got a {type(optimizer).__name__}: give it a built one.")
        check_number("eps", eps, 0)
        check_number("trust_coefficient", trust_coefficient, 0)
        if trust_coefficient == 0:
            raise ValueError("trust_coefficient=0 is invalid: it must be above 0.")
        # Not Optimizer.__init__, which would make groups and a state of its own.
        self.__setstate__({"optim": optimizer, "trust_coefficient": trust_coefficient, "clip": clip, "eps": eps})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __repr__(self) -> str:
        return f"LARC({self.optim!r}, trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps})"

    # --- what is the wrapped optimizer's -------------------------------------------------------------------------

    @property
    def wrapped_fused(self) -> FusedOptimizer | None:
        """The wrapped optimizer if it is a fused one, whose state is fp32 whatever its parameters are."""
        return self.optim if isinstance(self.optim, FusedOptimizer) else getattr(self.optim, "wrapped_fused", None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the wrapped optimizer."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optim.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients as the wrapped optimizer does."""
        self.optim.zero_grad(*([] if set_to_none is None else [set_to_none]))

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's: it can be loaded with and without a wrapper."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optim.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.optim.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # --- the step -----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of the wrapped optimizer with scaled gradients.

        Args:
            closure: Computes the loss and the gradients, and returns the loss.

        Returns:
            The closure's loss, or ``None`` without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._decay_taken_over() as decays, torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            try:
                for group, decay in zip(self.param_groups, decays, strict=True):
                    self._scale(group, decay)
                self.optim.step()
            finally:
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
        return loss

    @contextmanager
    def _decay_taken_over(self) -> Iterator[list[float]]:
        """Inside, the wrapped optimizer decays nothing. Gives the groups' weight decays."""
        groups = list(self.param_groups)
        decays = [group.get("weight_decay", 0.0) for group in groups]
        try:
            for group in groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            yield decays
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _scale(self, group: dict[str, Any], decay: float) -> None:
        """Gives a group's parameters scaled gradients, in memory of their own."""
        params = [p for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in params):
            raise RuntimeError(
                "LARC does not support sparse gradients: build the embedding with sparse=False, or give its parameters "
                "to an optimizer without LARC."
            )
        scaled = [torch.empty_like(p, dtype=p.grad.dtype) for p in params]
        places: dict[Place, list[tuple[Tensor, Tensor]]] = {}
        for pair in zip(params, scaled, strict=True):
            places.setdefault(place_of(pair[0]), []).append(pair)
        for (_, sharding), pairs in places.items():
            values = [local(p) for p, _ in pairs]
            grads = [like_local(p.grad, p) for p, _ in pairs]  # type: ignore[arg-type]
            norms = torch.stack([ops.tensor_norms(values, 2.0), ops.tensor_norms(grads, 2.0)])
            if sharding is not None:
                sharding.all_reduce_(norms, "sum")
            ratios = self._ratios(norms.sqrt(), group["lr"], decay).unbind()
            # An optimizer that ascends adds what it is given, and the decay must still shrink.
            signed = -decay if group.get("maximize") else decay
            for value, grad, ratio, (_, result) in zip(values, grads, ratios, pairs, strict=True):
                _write(local(result), value, grad, ratio, signed)
        for param, grad in zip(params, scaled, strict=True):
            param.grad = grad

    def _ratios(self, norms: Tensor, lr: float | Tensor, decay: float) -> Tensor:
        of_params, of_grads = norms
        ratio = self.trust_coefficient * of_params / (of_grads + decay * of_params + self.eps)
        if self.clip:
            lr = lr.to(ratio.device, ratio.dtype) if isinstance(lr, Tensor) else lr
            ratio = (ratio / lr).clamp(max=1)
        return torch.where((of_params > 0) & (of_grads > 0), ratio, 1.0)


def _write(result: Tensor, value: Tensor, grad: Tensor, ratio: Tensor, decay: float) -> None:
    if result.dtype in HALF:  # rounded once
        result.copy_(torch.add(grad.float(), value.float(), alpha=decay).mul_(ratio))
    else:
        torch.add(grad, value, alpha=decay, out=result).mul_(ratio)
