"""torch's DistributedDataParallel, taking the arguments of Apex's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MB = 2**20


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Averages gradients over processes while they are computed: torch's class, with Apex's arguments.

    ``torch.distributed`` is initialised and the module is on its device. Unlike torch, and like Apex, buffers such as
    BatchNorm's running statistics are rank 0's at the start only, and each rank's own from then on.

    Args:
        module: The module; after ``amp.initialize``, if that is called.
        message_size: How many elements are reduced in one message; at least 1.
        delay_allreduce: Whether parameters may lack a gradient, as ``find_unused_parameters=True`` says in torch.
        shared_param: Must be ``None``: shared parameters need nothing.
        allreduce_trigger_params: Without effect: torch finds the order of messages by itself.
        retain_allreduce_buffers: Must be False: torch's ``gradient_as_bucket_view=True`` shares the buffers' memory.
        allreduce_always_fp32: Whether half gradients are summed in fp32.
        num_allreduce_streams: Without effect: torch's process group has its own stream.
        allreduce_communicators: Without effect, likewise.
        gradient_average: False sums instead of averaging.
        gradient_predivide_factor: Gradients are divided by it before they are summed, and by the number of processes
            over it afterwards, if averaged.
        gradient_average_split_factor: The former name of ``gradient_predivide_factor``.
        prof: Without effect: ``torch.profiler`` sees every message.
        **kwargs: Further arguments of ``torch.nn.parallel.DistributedDataParallel``, such as ``device_ids``.

    Raises:
        ValueError: If an argument is invalid; the message names it.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(message_size, int) or isinstance(message_size, bool) or message_size < 1:
            raise ValueError(
                f"message_size={message_size!r} is invalid: it counts elements, at least 1. (torch's device_ids goes "
                "by name, device_ids=[...].)"
            )
        if shared_param is not None:
            raise ValueError(f"shared_param={shared_param!r} is gone: leave it out, shared parameters need nothing.")
        if retain_allreduce_buffers:
            raise ValueError(
                "retain_allreduce_buffers=True is gone: there is no `allreduce_buffers`; read `param.grad`, or pass "
                "gradient_as_bucket_view=True to save the memory."
            )
        factor = gradient_predivide_factor if gradient_average_split_factor is None else gradient_average_split_factor
        if not factor > 0:
            raise ValueError(f"gradient_predivide_factor={factor!r} is invalid: it must be above 0.")
        broadcast_buffers = kwargs.pop("broadcast_buffers", False)
        kwargs.setdefault("bucket_cap_mb", message_size * _widest(module) / _MB)
        kwargs.setdefault("find_unused_parameters", delay_allreduce)
        super().__init__(module, **kwargs)
        if "forward_sync_buffers" not in kwargs:
            self.broadcast_buffers = broadcast_buffers  # not before: they are to start equal
        if allreduce_always_fp32 or not gradient_average or factor != 1.0:
            divide_after = dist.get_world_size(self.process_group) / factor if gradient_average else 1.0
            how = _Reduction(self.process_group, allreduce_always_fp32, factor, divide_after)
            # A lambda, because torch reads a hook's annotations.
            self.register_comm_hook(how, lambda state, bucket: _reduce(state, bucket))

    def disable_allreduce(self) -> None:
        """Lets backward passes keep gradients to themselves, until `enable_allreduce`; like ``no_sync()``."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Makes the next backward pass reduce all gradients that have gathered."""
        self.require_backward_grad_sync = True


class _Reduction:
    """How a bucket of gradients is reduced."""

    def __init__(self, group: Any, in_fp32: bool, divide_before: float, divide_after: float) -> None:
        self.group, self.in_fp32 = group, in_fp32
        self.divide_before, self.divide_after = divide_before, divide_after


def _reduce(how: _Reduction, bucket: Any) -> torch.futures.Future[Tensor]:
    gradients: Tensor = bucket.buffer()
    summed = gradients.float() if how.in_fp32 and gradients.element_size() < 4 else gradients
    if how.divide_before != 1.0:
        summed.div_(how.divide_before)
    work = dist.all_reduce(summed, group=how.group, async_op=True)

    def finish(done: torch.futures.Future[Any]) -> Tensor:
        total: Tensor = done.value()[0]
        if how.divide_after != 1.0:
            total.div_(how.divide_after)
        return total if total is gradients else gradients.copy_(total)

    result: torch.futures.Future[Tensor] = work.get_future().then(finish)
    return result


def _widest(module: nn.Module) -> int:
    """Bytes of the largest kind of element that is reduced."""
    return max((param.element_size() for param in module.parameters() if param.requires_grad), default=4)
