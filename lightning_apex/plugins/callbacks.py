"""The body of a callback that shows what loss scaling does; see `lightning_apex.plugins.namespace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_apex.plugins.namespace import TrainerNamespace

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object


class LossScaleMonitorBody(Callback):
    """Logs ``loss_scale``, ``skipped_steps`` and ``grad_norm``, and reports each overflow in one line.

    The norm is that of the unscaled gradients before clipping. A report names the step, the old and the new scale, and
    the modules whose gradients were not finite.

    Args:
        prog_bar: Whether the values also appear in the progress bar.

    Raises:
        MisconfigurationException: If the Trainer's precision plugin is not `ApexPrecision`.
    """

    _lightning: TrainerNamespace

    def __init__(self, prog_bar: bool = True) -> None:
        self.prog_bar = prog_bar

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._lightning.refuse_stranger(trainer, type(self).__name__)
        if not hasattr(trainer.precision_plugin, "last_grad_norm"):
            raise self._lightning.misuse(
                f"LossScaleMonitor needs Trainer(plugins=[ApexPrecision(...)]), but the precision plugin is "
                f"{type(trainer.precision_plugin).__name__}."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plugin: Any = trainer.precision_plugin
        values: dict[str, Any] = {}
        if plugin.scaler.is_enabled():
            values["loss_scale"] = plugin.scaler.scale_tensor.clone()
            values["skipped_steps"] = plugin.scaler.skipped_tensor.float()
        if plugin.last_grad_norm is not None:
            values["grad_norm"] = plugin.last_grad_norm
        if values:
            pl_module.log_dict(values, prog_bar=self.prog_bar, on_step=True, on_epoch=False)
        self._report(plugin)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        plugin.scaler.watch.collect(wait=True)
        self._report(plugin)

    def _report(self, plugin: Any) -> None:
        for report in plugin.scaler.watch.take_unread():
            rank_zero_info(f"Step {report.step}: {report}.")
