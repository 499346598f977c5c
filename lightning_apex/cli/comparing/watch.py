"""The callback that measures a run while it trains, and writes an event for all that it sees."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer  # stands in for none
from torch import Tensor

from lightning_apex import ApexPrecision
from lightning_apex.cli.comparing.records import Memory
from lightning_apex.cli.comparing.saved import SavedBytes
from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.probe import ExponentProbe

Emit = Callable[[dict[str, Any]], None]
_WARM_UP = 2  # steps; the optimizer's state and the allocator's pools come with them
_MEMORY_STEP = 1
_PROBED_STEPS = 4


class Watch(Callback):
    """Measures steps; a step is one of the optimizer, or a batch where the model optimizes by hand.

    Args:
        emit: Takes events; see `run_of_events`.
        steps: How many there will be.
        seed: Makes what is drawn in a step depend on its number alone, so that a level that draws more or fewer numbers
            sees the same data as the others.
        probes_ranges: Whether activations and gradients are looked at.
    """

    def __init__(self, emit: Emit, steps: int, seed: int, probes_ranges: bool) -> None:
        self._emit, self._steps, self._seed = emit, steps, seed
        self._probed = set(range(0, steps, max(2, steps // _PROBED_STEPS))) if probes_ranges else set()
        self._probe: ExponentProbe | None = None
        self._parent = os.getppid()
        self._batches = self._done = 0
        self._window = _Window()
        self._measuring = ExitStack()
        self._saved: SavedBytes | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses a model without an optimizer, and prepares to look at ranges."""
        if not trainer.optimizers or isinstance(trainer.optimizers[0], _MockOptimizer):
            raise CommandError(f"{type(pl_module).__name__}.configure_optimizers returns no optimizer: return one.")
        if self._probed:
            self._probe = ExponentProbe(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock, and what else is measured in this step."""
        self._draw_anew(0)
        if self._done == min(_MEMORY_STEP, self._steps - 1):
            self._saved = self._measuring.enter_context(SavedBytes(_tensors_of(pl_module, _masters(trainer))))
        if self._probe is not None and self._done in self._probed:
            self._measuring.enter_context(self._probe)
        _wait(pl_module.device)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes down the step, if the batch ended one."""
        _wait(pl_module.device)
        self._window.add(time.perf_counter() - self._start, _losses(trainer, pl_module, outputs))
        measured = self._saved is not None or (self._probe is not None and self._done in self._probed)
        self._measuring.close()
        self._batches += 1
        self._draw_anew(1)
        if os.getppid() != self._parent:  # nobody waits for this run
            raise SystemExit(1)
        if pl_module.automatic_optimization and trainer.global_step == self._done:
            return
        if self._saved is not None:
            self._emit({"kind": "memory"} | vars(measure_memory(pl_module, trainer, self._saved.peak)))
            self._saved = None
        self._end_step(trainer, timed=not measured and self._done >= _WARM_UP)

    def _end_step(self, trainer: Trainer, timed: bool) -> None:
        seconds, losses = self._window.take()
        plugin: Any = trainer.precision_plugin
        scaler = plugin.scaler
        self._done += 1
        scaler.check(wait=True)
        for report in scaler.watch.take_unread():
            event = {"step": self._done, "old_scale": report.old_scale, "new_scale": report.new_scale}
            self._emit({"kind": "overflow", **event, "modules": list(report.modules)})
        self._emit({"kind": "step", "losses": losses, "seconds": seconds, "timed": timed, "scale": scaler.get_scale()})
        if self._done >= self._steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes down what is known only now."""
        if pl_module.device.type == "cuda":
            self._emit({"kind": "peak", "bytes": torch.cuda.max_memory_allocated(pl_module.device)})
        if self._probe is not None:
            report = self._probe.report()
            gradients = report.total("weight_gradients") + report.total("activation_gradients")
            self._emit(
                {
                    "kind": "ranges",
                    "activations": report.first_out_of_range("activations", finite=True),
                    "gradients": report.first_out_of_range("gradients", finite=True),
                    "flushed_share": gradients.fate(torch.float16).flushed_share,
                    "not_finite": report.first_not_finite,
                }
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends what a step that fails was measured with: hooks of autograd would outlive the training."""
        self._measuring.close()

    def check_complete(self) -> None:
        """Refuses a training that ended early; called after it, since without batches no hook is."""
        if self._done < self._steps:
            raise CommandError(
                f"training ended after {self._done} of {self._steps} steps: are there training batches, and does "
                "nothing stop the Trainer early?"
            )

    def _draw_anew(self, stream: int) -> None:
        torch.manual_seed((self._seed * 1_000_003 + self._batches) * 2 + stream)


class _Window:
    """The batches of one step."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._losses: dict[str, list[float]] = {}

    def add(self, seconds: float, losses: dict[str, float]) -> None:
        self._seconds += seconds
        for name, value in losses.items():
            self._losses.setdefault(name, []).append(value)

    def take(self) -> tuple[float, dict[str, float]]:
        seconds, losses = self._seconds, {name: sum(v) / len(v) for name, v in self._losses.items()}
        self.__init__()  # type: ignore[misc]
        return seconds, losses


def _losses(trainer: Trainer, module: LightningModule, outputs: Any) -> dict[str, float]:
    """The loss that training_step returned; of a model that returns none, what it logs."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if isinstance(loss, Tensor):
        # Lightning has divided it, for gradients that are added up.
        return {"loss": float(loss) * (trainer.accumulate_grad_batches if module.automatic_optimization else 1)}
    if module.automatic_optimization:
        return {}
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if value.numel() == 1 and not name.endswith("_epoch")}


# --- memory ---------------------------------------------------------------------------------------------------------


def measure_memory(module: LightningModule, trainer: Trainer, activations: int) -> Memory:
    """Walks weights, masters, gradients and the optimizers' state; to be called while the gradients are there."""
    states = (v for o in trainer.optimizers for state in o.state.values() for v in state.values())
    grads = (param.grad for param in module.parameters() if param.grad is not None)
    return Memory(
        weights=_bytes([*module.parameters(), *module.buffers()]),
        masters=_bytes(_masters(trainer)),
        gradients=_bytes(grads),
        optimizer=_bytes(value for value in states if isinstance(value, Tensor)),
        activations=activations,
    )


def _masters(trainer: Trainer) -> Iterator[Tensor]:
    plugin = trainer.precision_plugin
    masters = plugin.masters if isinstance(plugin, ApexPrecision) else None
    return iter(()) if masters is None else (masters.of(half) for half in masters)


def _tensors_of(module: LightningModule, masters: Iterable[Tensor]) -> list[Tensor]:
    return [*module.parameters(), *module.buffers(), *masters]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
