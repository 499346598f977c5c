"""The body of the strategies that Lightning knows by name; see `lightning_apex.plugins.namespace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_apex.plugins.layer_sync import ApexSyncBatchNormBody
from lightning_apex.plugins.namespace import TrainerNamespace

if TYPE_CHECKING:
    from lightning.pytorch.plugins.layer_sync import LayerSync
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object


class ApexDDPStrategyBody(DDPStrategy):
    """DDP with synchronised BatchNorm: ``Trainer(strategy="apex_ddp", devices=4)``.

    The names are those of DDP, with ``apex_`` before them: ``apex_ddp_spawn``, ``apex_ddp_fork``,
    ``apex_ddp_notebook``, and each with ``_find_unused_parameters_true`` or ``_false`` at its end.

    Args:
        group_size: See `ApexSyncBatchNorm`.
        channel_last: See `ApexSyncBatchNorm`.
        **kwargs: For `DDPStrategy`.
    """

    _lightning: TrainerNamespace
    _sync_batch_norm: type[ApexSyncBatchNormBody]

    def __init__(self, *, group_size: int = 0, channel_last: bool = False, **kwargs: Any) -> None:
        self._apex_sync = self._sync_batch_norm(group_size, channel_last)
        super().__init__(**kwargs)

    def __repr__(self) -> str:
        # Lightning's message about a strategy that it does not know shows this.
        return f"<{type(self).__name__} ({self._lightning.hint(type(self).__name__)})>"

    @property
    def _layer_sync(self) -> LayerSync | None:
        return self._given_sync

    @_layer_sync.setter
    def _layer_sync(self, given: LayerSync | None) -> None:
        # The Trainer sets None where it was given no plugin, and torch's for sync_batchnorm=True.
        torchs = self._lightning.TorchSyncBatchNorm
        self._given_sync = self._apex_sync if given is None or type(given) is torchs else given

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the names; again, too."""
        for method, start in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            for ending, options in (
                ("", {}),
                ("_find_unused_parameters_false", {"find_unused_parameters": False}),
                ("_find_unused_parameters_true", {"find_unused_parameters": True}),
            ):
                strategy_registry.register(
                    f"apex_ddp{method}{ending}",
                    cls,
                    description="DDP with SyncBatchNorm of lightning_apex",
                    override=True,
                    start_method=start,
                    **options,
                )
