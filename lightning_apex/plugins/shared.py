"""What the precision plugins for Trainer and Fabric have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_apex.engine import PrecisionEngine
from lightning_apex.fsdp import fully_shard
from lightning_apex.levels import resolve
from lightning_apex.masters import MasterWeights
from lightning_apex.overflow import OverflowReport
from lightning_apex.plugins.namespace import Namespace
from lightning_apex.scaler import LossScaler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PluginBase:
    """The settings of a precision plugin, its engine, and what people read from it.

    Stands before Lightning's class among the bases of a plugin. See `lightning_apex.ApexPrecision` for the arguments.
    """

    _lightning: Namespace  # a plugin's own

    def __init__(
        self,
        opt_level: Literal["O0", "O1", "O2", "O3", "O4", "O5"] = "O1",
        *,
        half_dtype: str | torch.dtype | None = None,
        keep_batchnorm_fp32: bool | None = None,
        master_weights: bool | None = None,
        loss_scale: float | Literal["dynamic"] | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_loss_scale: float = 2.0**-10,
        max_loss_scale: float = 2.0**24,
        keep_fp32: Sequence[str | type] = (),
        max_consecutive_skips: int | None = 50,
    ) -> None:
        self.level = resolve(
            opt_level,
            half_dtype=half_dtype,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
        )
        self.scaler = LossScaler(
            self.level.loss_scale,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            max_consecutive_skips=max_consecutive_skips,
        )
        self.keep_fp32 = _names_and_classes(keep_fp32)
        self._told_of_cpu = False
        self._begin()

    def _begin(self) -> None:
        """Sets everything that belongs to a run, and to no copy of the plugin, as it is before the run."""
        self._engine = PrecisionEngine(self.level, self.scaler, self.keep_fp32)

    def _new_engine(self, device_type: str) -> PrecisionEngine:
        level = self.level.on(device_type)
        if level.half_dtype is not self.level.half_dtype and not self._told_of_cpu:
            self._told_of_cpu = True
            rank_zero_warn(
                f"ApexPrecision({level.name!r}) uses bfloat16 instead of float16 on a CPU, where float16 is very slow: "
                "give half_dtype='bfloat16' to agree, or half_dtype='float16' to insist."
            )
        return PrecisionEngine(level, self.scaler, self.keep_fp32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.level.name!r})"

    def __str__(self) -> str:
        # Lightning shows this where it does not know a plugin, and where it refuses one beside its FSDPStrategy.
        hint = self._lightning.hint(type(self).__name__)
        return f"{self!r} ({hint}; for FSDP2 use ModelParallelStrategy and plugin.fully_shard())"

    # --- what people read ---------------------------------------------------------------------------------------

    @property
    def precision(self) -> str:
        """The nearest of Lightning's own precision strings."""
        return self._engine.level.lightning_precision

    @property
    def masters(self) -> MasterWeights | None:
        """The fp32 masters of the model being trained.

        ``None`` at levels without masters, between runs, and under FSDP2, whose fp32 shards are the masters.
        """
        return self._engine.masters

    @property
    def last_overflow(self) -> OverflowReport | None:
        """The newest skipped step of this run; ``None`` while none was skipped.

        Reading waits for the device, as ``loss.item()`` does; nothing waits where nobody reads.
        """
        return self.scaler.last_overflow

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global L2 norm of the last step's unscaled gradients before clipping, where it was measured."""
        return self._engine.last_norm

    # --- models that are spread over processes ------------------------------------------------------------------

    def fully_shard(
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        mesh: DeviceMesh,
        reduce_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls torch's ``fully_shard`` (FSDP2), such that a module computes as the opt level says.

        Called like torch's, from the layers of a model to the whole: in ``configure_model`` of a `LightningModule`, or
        in the ``parallelize_fn`` of Fabric's `ModelParallelStrategy`. At O2 and O5 the weights are gathered in the half
        type, and the fp32 shards are the masters; BatchNorm and the classes of ``keep_fp32`` are gathered in fp32, and
        so must be modules that ``keep_fp32`` names by a pattern, with torch's function and before those around them.
        ``configure_model`` is called for every fit and test: what is spread already stays as it is.

        Args:
            module: A module, or several that are gathered together.
            mesh: The processes to spread it over, such as ``self.device_mesh["data_parallel"]``; two-dimensional for
                weights that are spread within a group of processes, and the same in all groups (HSDP).
            reduce_dtype: What gradients are averaged in; ``None`` for the dtype they are computed in.
            **kwargs: For ``torch.distributed.fsdp.fully_shard``, but not ``mp_policy``.

        Raises:
            OptLevelError: At O3, and at other levels with half weights and no masters.
            ValueError: If ``mp_policy`` is given.
        """
        classes = tuple(entry for entry in self.keep_fp32 if isinstance(entry, type))
        return fully_shard(module, self.level.on(mesh.device_type), classes, reduce_dtype, mesh=mesh, **kwargs)

    # --- what Lightning calls, the same in both -----------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """What a forward pass runs in."""
        return self._engine.forward_context()

    def convert_input(self, data: Any) -> Any:
        """Casts a batch where the level does so."""
        return self._engine.convert_input(data)

    def state_dict(self) -> dict[str, Any]:
        """The state of the loss scale; empty where losses are not scaled."""
        return self.scaler.state_dict()

    # --- a step -------------------------------------------------------------------------------------------------

    def _has_scaled_gradients(self, optimizer: Optimizer, instead: str) -> bool:
        """Whether a step is due; gradients past the loss scale are refused, with what to call instead."""
        if self._engine.has_fresh_gradients(optimizer):
            return True
        if not self._engine.has_gradients(optimizer):
            return False
        if self.scaler.is_enabled():
            raise self._lightning.misuse(
                f"{type(optimizer).__name__}.step() found gradients of a loss that was not scaled: call {instead} "
                "instead of loss.backward(), once before each step."
            )
        return True

    def _drop_step(self, optimizer: Optimizer) -> None:
        """Ends a step that is not due."""
        self.scaler.drop(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # no step was due, so schedulers are in order

    def _refuse_closure_driven(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and self._engine.steps_itself:
            raise self._lightning.misuse(
                f"LBFGS evaluates the loss several times a step, which ApexPrecision({self.level.name!r}) cannot scale "
                "or skip as a whole: use opt_level='O0' or 'O4' with LBFGS, or another optimizer."
            )


def _names_and_classes(keep_fp32: Any) -> tuple[str | type, ...]:
    entries = (keep_fp32,) if isinstance(keep_fp32, str | type) else keep_fp32
    if not isinstance(entries, Sequence) or not all(isinstance(entry, str | type) for entry in entries):
        raise ValueError(f"keep_fp32={keep_fp32!r} is invalid: give a list of module name patterns or module classes.")
    return tuple(_class_at(entry) or entry for entry in entries)


def _class_at(entry: str | type) -> type | None:
    """The module class at an import path: a command line can give no class itself. Imports nothing."""
    if isinstance(entry, type):
        return None
    module, _, name = entry.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, torch.nn.Module) else None
