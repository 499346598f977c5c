"""BatchNorm over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Self

from lightning_apex.casting import HALF
from lightning_apex.parallel._collectives import group_to_sync
from lightning_apex.parallel._function import BatchNormFunction, refuse_single_value, values_per_channel

_KERNEL_DEVICES = ("cpu", "cuda")


class SyncBatchNorm(_BatchNorm):
    r"""Batch normalisation with the statistics of all ranks: equal to BatchNorm on their batches put together.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \gamma + \beta
              \quad [+\ z]\quad [\text{then } \max(\cdot, 0)]

    Training exchanges means, sums of squared deviations and counts in one all_gather, and two sums in one all_reduce
    in the backward pass; ranks may have batches of different sizes, and empty ones. In ``eval()``, and where a process
    is alone, nothing is exchanged. Runs on CPUs and on CUDA, with fp32, fp16, bf16 and fp64 input; statistics are
    computed in fp32 at least, and the output has the input's dtype and memory format.

    All ranks of the process group must run the same layers in the same order. If one stays away, the others raise an
    error once the group's timeout is over.

    Args:
        num_features: C, the number of channels.
        eps: Added to the variance.
        momentum: The weight of a new batch in the running statistics; None for their plain average.
        affine: Whether there are a weight and a bias to learn.
        track_running_stats: Whether to keep running statistics for ``eval()``.
        process_group: The ranks that share statistics; None for all. See `create_syncbn_process_group`.
        channel_last: Whether the input has its channels in the last dimension, ``[N, *, C]``. An input ``[N, C, *]``
            is recognised too, by its sizes, or where both fit by ``torch.channels_last`` memory. Without it the input
            is ``[N, C, *]``, in any memory format.
        fuse_relu: Whether a ReLU follows, after ``z`` is added.
        device: Of the parameters and buffers.
        dtype: Of the parameters and buffers.
    """

    process_group: Any | None = None
    channel_last: bool = False
    fuse_relu: bool = False
    _reverts_to: type[_BatchNorm] | None = None  # of a module that convert_syncbn_model made

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalises a batch.

        Args:
            input: ``[N, C, *]``, or ``[N, *, C]`` with ``channel_last``.
            z: Added to the result, before the ReLU if there is one; of the input's shape.

        Raises:
            ValueError: If a shape does not fit, or in training a channel has a single value over all ranks.
        """
        self._check_input_dim(input)
        if z is not None and z.shape != input.shape:
            raise ValueError(f"z has shape {list(z.shape)}, and the input {list(input.shape)}: they must be equal.")
        if z is not None and z.dtype != input.dtype:
            z = z.to(input.dtype)
        if input.dim() == 2 or not self._has_channels_last(input):
            return self._normalize(input, z)
        # The same numbers in the same memory: one row a position
        rows = None if z is None else z.reshape(-1, z.size(-1))
        return self._normalize(input.reshape(-1, input.size(-1)), rows).view(input.shape)

    def _check_input_dim(self, input: Tensor) -> None:
        if self._reverts_to is not None:
            self._reverts_to._check_input_dim(self, input)
        elif input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _has_channels_last(self, input: Tensor) -> bool:
        if not self.channel_last:
            return False
        first, last = (input.size(dim) == self.num_features for dim in (1, -1))
        if not (first or last):
            raise ValueError(
                f"The input of shape {list(input.shape)} has {self.num_features} channels neither in its last "
                "dimension, as channel_last=True expects, nor in dimension 1."
            )
        # Both: a [N, C, H, W] tensor in torch.channels_last memory has its channels side by side.
        return last and not (first and input.stride(1) == 1 and input.stride(-1) != 1)

    def _normalize(self, input: Tensor, z: Tensor | None) -> Tensor:
        """Of a batch with its channels in dimension 1."""
        if not self.training:
            return self._torch_batch_norm(input, z, 0.0)
        group = group_to_sync(self.process_group)
        kernels = input.device.type in _KERNEL_DEVICES
        if group is not None and not kernels:
            raise RuntimeError(f"SyncBatchNorm runs on {' and '.join(_KERNEL_DEVICES)}, not on {input.device.type}.")
        if group is not None:
            self._refuse_other_channels(input)
            shared: Tensor = self._batch_norm_over_ranks(input, z, group)
            return shared
        refuse_single_value(values_per_channel(input), input.shape, 1)
        if kernels and input.numel() > 0 and not _is_transformed():
            return self._batch_norm(input, z, None)
        weight = self._update_weight()
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return self._torch_batch_norm(input, z, weight)

    def _refuse_other_channels(self, input: Tensor) -> None:
        """Before ranks exchange messages of unlike sizes, which ends a process of gloo's."""
        for tensor in (self.weight, self.running_mean):
            if tensor is not None and tensor.numel() != input.size(1):
                raise ValueError(
                    f"The input of shape {list(input.shape)} has {input.size(1)} channels, and this layer "
                    f"{tensor.numel()}: they must be equal."
                )

    def _batch_norm(self, input: Tensor, z: Tensor | None, group: Any | None) -> Tensor:
        statistics = (self.running_mean, self.running_var, self.num_batches_tracked)
        if not self.track_running_stats:
            statistics = (None, None, None)
        out: Tensor = BatchNormFunction.apply(
            input, self.weight, self.bias, z, *statistics, self.eps, self._update_weight(), self.fuse_relu, group
        )
        return out

    # The compiler cannot follow collectives that others wait for: it runs this as it stands, between two graphs.
    # Not torch.compiler.disable, which would import the compiler here and now.
    _batch_norm_over_ranks = _disable_dynamo(_batch_norm)

    def _torch_batch_norm(self, input: Tensor, z: Tensor | None, momentum: float) -> Tensor:
        """In torch's operators, which the compiler fuses: what needs no other rank and no kernel of ours."""
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        mean, var = self.running_mean, self.running_var
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if not self.training:
            mean, var, weight, bias = _matching(input, mean, var, weight, bias)
        elif not self.track_running_stats:
            mean = var = None
        out = F.batch_norm(input, mean, var, weight, bias, by_batch, momentum, self.eps)
        if z is not None:
            out.add_(z)
        return out.relu_() if self.fuse_relu else out

    def _update_weight(self) -> float:
        """The weight of this batch in the running statistics."""
        if self.momentum is not None:
            return self.momentum
        if not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0
        return 1.0 / (float(self.num_batches_tracked) + 1.0)

    def extra_repr(self) -> str:
        """BatchNorm's, and what is not the default of ours."""
        extras = [f"{name}=True" for name in ("channel_last", "fuse_relu") if getattr(self, name)]
        return ", ".join((super().extra_repr(), *extras))  # type: ignore[no-untyped-call]

    # --- copies -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A process group is not copied: the twin belongs to the same.
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "A SyncBatchNorm with a process group cannot be pickled, because the group means nothing to another "
                "process: save the state_dict(), or revert the model first."
            )
        return self.__dict__.copy()


def _is_transformed() -> bool:
    """Whether the compiler, a transform of `torch.func` or forward-mode differentiation must see torch's operators."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _matching(input: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in a type that torch's batch_norm takes beside the input's: the same, or fp32 beside a half one."""
    types = {t.dtype for t in tensors if t is not None}
    if types <= {input.dtype} or (input.dtype in HALF and types == {torch.float32}):
        return tensors
    wide = torch.promote_types(input.dtype, torch.float32)
    return tuple(None if t is None else t.to(wide) for t in tensors)
