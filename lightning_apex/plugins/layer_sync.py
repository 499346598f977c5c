"""The body of the plugin that makes a Trainer's strategy synchronise BatchNorm; see `plugins.namespace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn import Module
from typing_extensions import override

from lightning_apex.parallel import convert_syncbn_model, create_syncbn_process_group, revert_syncbn_model
from lightning_apex.plugins.namespace import TrainerNamespace

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
else:
    TorchSyncBatchNorm = object


class ApexSyncBatchNormBody(TorchSyncBatchNorm):
    """Synchronised BatchNorm while fitting: ``Trainer(plugins=[ApexSyncBatchNorm()], strategy="ddp", devices=4)``.

    Every BatchNorm of the model shares its statistics with the other ranks, on CPUs too; see `SyncBatchNorm` and
    `convert_syncbn_model`. Validation and testing exchange nothing, and after ``fit`` the model has the classes it had.
    ``sync_batchnorm=True`` beside the plugin is allowed. Strategies other than DDP and FSDP ignore it.

    Args:
        group_size: How many neighbouring ranks share statistics, a divisor of the world size; 0 for all.
        channel_last: Whether the model's activations have their channels in the last dimension, ``[N, *, C]``.
        process_group: A group to use in place of ``group_size``.

    Raises:
        ValueError: If ``group_size`` is negative, or given beside a process group.
    """

    _lightning: TrainerNamespace

    def __init__(self, group_size: int = 0, channel_last: bool = False, process_group: Any | None = None) -> None:
        if group_size < 0:
            raise ValueError(f"group_size={group_size} is invalid: give a number of ranks, or 0 for all.")
        if group_size and process_group is not None:
            raise ValueError(f"Both group_size={group_size} and a process_group are given: give one of them.")
        self.group_size = group_size
        self.channel_last = channel_last
        self.process_group = process_group
        self._own_group: Any | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group_size={self.group_size}, channel_last={self.channel_last})"

    def __str__(self) -> str:
        return f"{self!r} ({self._lightning.hint(type(self).__name__)})"

    @override
    def apply(self, model: Module) -> Module:
        """Synchronises the BatchNorm modules of a model, in place."""
        if self.group_size:
            self._own_group = create_syncbn_process_group(self.group_size)
        group = self.process_group if self._own_group is None else self._own_group
        return convert_syncbn_model(model, group, self.channel_last)

    @override
    def revert(self, model: Module) -> Module:
        """Gives the modules the classes they had."""
        group, self._own_group = self._own_group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        return revert_syncbn_model(model)

    def __getstate__(self) -> dict[str, Any]:
        # Each process makes its own group.
        return self.__dict__ | {"_own_group": None}


def warn_where_ignored(trainer: Trainer) -> None:
    """Warns if a Trainer of several processes has an `ApexSyncBatchNorm` and a strategy that does not apply it."""
    plugin = trainer._accelerator_connector._layer_sync
    if trainer.state.fn != "fit" or trainer.world_size == 1 or not isinstance(plugin, ApexSyncBatchNormBody):
        return
    if not isinstance(trainer.strategy, plugin._lightning.apply_layer_sync):
        rank_zero_warn(
            f"{type(trainer.strategy).__name__} ignores ApexSyncBatchNorm: every process keeps BatchNorm statistics of "
            "its own. Use strategy='apex_ddp' or 'ddp', or leave the plugin out."
        )
