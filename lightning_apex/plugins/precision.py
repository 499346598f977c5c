"""The body of the precision plugin for Lightning's Trainer; see `lightning_apex.plugins.namespace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_apex.plugins.averaging import AveragingAdapter
from lightning_apex.plugins.callbacks import LossScaleMonitorBody
from lightning_apex.plugins.layer_sync import warn_where_ignored
from lightning_apex.plugins.model_parallel import evaluate_without_inference_mode
from lightning_apex.plugins.namespace import OURS, TrainerNamespace
from lightning_apex.plugins.shared import PluginBase
from lightning_apex.schedulers import SchedulerGate

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
else:
    Precision = object


class ApexPrecisionBody(PluginBase, Precision):  # type: ignore[misc]
    """Mixed-precision training at an opt level: ``Trainer(plugins=[ApexPrecision("O2")])``.

    ===== ======= ============================= ========= ======= ==========
    level weights compute                       BatchNorm masters loss scale
    ===== ======= ============================= ========= ======= ==========
    O0    fp32    fp32                          fp32      no      1
    O1    fp32    autocast fp16                 fp32      no      dynamic
    O2    fp16    fp16, losses fp32             fp32      fp32    dynamic
    O3    fp16    fp16                          fp16      no      1
    O4    fp32    autocast bf16                 fp32      no      1
    O5    bf16    bf16, losses fp32             fp32      fp32    1
    ===== ======= ============================= ========= ======= ==========

    On a CPU the levels O1 to O3 use bf16 unless ``half_dtype="float16"`` is given. Checkpoints hold fp32 weights at
    every level, and any level resumes what any level saved.

    Args:
        opt_level: ``"O0"`` to ``"O5"``.
        half_dtype: ``"float16"``, ``"bfloat16"`` or the torch dtype; ``None`` for the level's own.
        keep_batchnorm_fp32: Whether modules with running statistics stay in fp32; ``None`` for the level's own.
        master_weights: Whether optimizers update fp32 copies of half weights; ``None`` for the level's own.
        loss_scale: A fixed factor, or ``"dynamic"``; ``None`` for the level's own.
        init_scale: The first dynamic loss scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: What the scale is multiplied by at an overflow.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Overflows tolerated before the scale backs off.
        min_loss_scale: The floor of the dynamic scale.
        max_loss_scale: The ceiling of the dynamic scale.
        keep_fp32: Module name patterns (``"encoder.*.norm"``), classes, or import paths of classes
            (``"torch.nn.LayerNorm"``), whose modules compute in fp32, with fp32 weights.
        max_consecutive_skips: After so many skipped steps in a row the run ends with `LossScaleError`.
        hold_schedulers: Whether a learning-rate scheduler stands still while its optimizer's steps are skipped.

    Raises:
        OptLevelError: If the level is unknown, or an argument is invalid or contradicts the level.
        ValueError: If an argument of the loss scale is out of range.
    """

    _lightning: TrainerNamespace

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
        hold_schedulers: bool = True,
    ) -> None:
        super().__init__(
            opt_level,
            half_dtype=half_dtype,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            keep_fp32=keep_fp32,
            max_consecutive_skips=max_consecutive_skips,
        )
        self.hold_schedulers = hold_schedulers

    @override
    def _begin(self) -> None:
        super()._begin()
        self._module: LightningModule | None = None
        self._optimizers: list[Optimizer] = []
        self._gate = SchedulerGate()
        self._averaging: AveragingAdapter | None = None
        self._exposes_gradients = False
        self._update = ExitStack()  # the profiler's section that an optimizer step ends

    # --- the model ----------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: Module) -> Module:
        self._lightning.refuse_stranger(module, "ApexPrecision")
        trainer = module._trainer if isinstance(module, self._lightning.LightningModule) else None
        self._refuse_second_trainer(trainer)
        self.teardown()  # of a run that ended without one
        if trainer is not None:
            self._refuse_strategy(trainer)
            warn_where_ignored(trainer)
            device = trainer.strategy.root_device.type
        else:
            device = next((p.device.type for p in module.parameters()), "cpu")
        engine = self._new_engine(device)
        if trainer is not None and isinstance(trainer.strategy, self._lightning.ModelParallelStrategy):
            engine.convert_sharded(module, device)
            evaluate_without_inference_mode(trainer)
        else:
            engine.convert(module, device)
        self._engine = engine
        self._module = module if isinstance(module, self._lightning.LightningModule) else None
        return module

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        if self._module is None:
            return model, optimizers, lr_schedulers
        trainer = self._module.trainer
        if trainer.world_size > 1:
            self._engine.agree_across_ranks()
        # Evaluation connects the optimizers of the last fit again.
        if trainer.state.fn != "fit":
            return model, optimizers, lr_schedulers
        for optimizer in optimizers:
            self._refuse_closure_driven(optimizer)
        self._optimizers = optimizers
        self.scaler.begin_run()
        self._engine.adopt(optimizers)
        self._engine.measures_always = any(isinstance(cb, LossScaleMonitorBody) for cb in trainer.callbacks)  # type: ignore[attr-defined]
        self._exposes_gradients = self._someone_looks_at_gradients(self._module, trainer)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if not isinstance(profiler, self._lightning.PassThroughProfiler):
            self.scaler.sections.profile = lambda name: profiler.profile(f"[ApexPrecision]{name}")
        if self.hold_schedulers and self.scaler.is_enabled():
            self._gate.watch(config.scheduler for config in lr_schedulers)
        if self._engine.cast is not None:
            self._averaging = AveragingAdapter(self._module, self._engine.cast, self._lightning)
            self._averaging.attach(trainer.callbacks)  # type: ignore[attr-defined]
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        self._gate.release()
        if self._averaging is not None:
            self._averaging.detach()
            self._averaging = None
        self._engine.restore()
        self.scaler.forget_steps()
        self.scaler.sections.profile = None
        self._module = None
        self._optimizers = []

    # --- the training step --------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if not isinstance(module, self._lightning.LightningModule):
            raise self._lightning.misuse(
                "This ApexPrecision is the Trainer's: give Fabric(plugins=...) the one of "
                f"{OURS[self._lightning.fabric]}."
            )
        # on_before_backward sees the loss that training_step returned.
        loss = super().pre_backward(tensor, module)
        scaled: Tensor = self._engine.scale(loss)
        return scaled

    @override
    def backward(self, tensor: Tensor, model: LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with self._engine.backward_context():
            super().backward(tensor, model, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if not self._engine.steps_itself:
            with self._update:
                return super().optimizer_step(optimizer, model, closure, **kwargs)
        self._refuse_closure_driven(optimizer)
        result = closure()
        if not self._may_step(optimizer, model):
            self._after_closure(model, optimizer)
            self._drop_step(optimizer)
            return result
        step = self._engine.open(optimizer)
        step.number = model.trainer.global_step + 1
        if self._exposes_gradients:
            step.expose()
        self._after_closure(model, optimizer)
        self._gate.note(optimizer, self._engine.finish(optimizer, self._optimizers, **kwargs).found_inf)
        return result

    @override
    def _wrap_closure(self, model: LightningModule, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        self._update.close()
        result = super()._wrap_closure(model, optimizer, closure)
        self._engine.hand_over(optimizer)
        self._update.enter_context(self.scaler.sections("update"))
        return result

    def _may_step(self, optimizer: Optimizer, model: LightningModule) -> bool:
        """No gradient, no step: what a skipped backward pass left behind must not be used again."""
        if model.automatic_optimization:
            return self._engine.has_fresh_gradients(optimizer)
        return self._has_scaled_gradients(optimizer, "self.manual_backward(loss)")

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: str = "norm",  # Lightning's enumeration is a str
    ) -> None:
        if clip_val <= 0 or self._module is None:
            return
        optimizer = getattr(optimizer, "optimizer", optimizer)  # manual optimization hands a LightningOptimizer
        step = self._engine.open(optimizer)
        if self._exposes_gradients or not self._module.automatic_optimization:
            step.expose()
        if gradient_clip_algorithm == "value":
            step.clip_value(clip_val)
        else:
            step.clip_norm(clip_val)

    def _someone_looks_at_gradients(self, module: LightningModule, trainer: Trainer) -> bool:
        """Whether a hook may read or edit the gradients between backward and the update, and wants them unscaled."""
        is_overridden = self._lightning.is_overridden
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        return any(is_overridden(hook, module) for hook in hooks) or any(
            is_overridden("on_before_optimizer_step", callback, self._lightning.Callback) for callback in callbacks
        )

    def _refuse_strategy(self, trainer: Trainer) -> None:
        if isinstance(trainer.strategy, self._lightning.cast_themselves):
            raise self._lightning.misuse(
                f"ApexPrecision does not work with {type(trainer.strategy).__name__}, which casts the model itself: "
                "use strategy='ddp', or ModelParallelStrategy() with plugin.fully_shard() in configure_model for a "
                "model that is too large for one device; or Trainer(precision='bf16-mixed') without this plugin."
            )

    def _refuse_second_trainer(self, trainer: Trainer | None) -> None:
        busy = self._module._trainer if self._module is not None else None
        if busy is not None and busy is not trainer and busy.state.status == "running":
            raise self._lightning.misuse(
                "This ApexPrecision object is at work in another Trainer that is still running: give each Trainer its "
                "own ApexPrecision."
            )

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # trainer.test(ckpt_path=...) must not change the loss scale of the training it interrupts.
        if self._module is None or self._module.trainer.state.fn == "fit":
            self.scaler.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own, *bases = (kind.__qualname__ for kind in type(self).__mro__ if issubclass(kind, ApexPrecisionBody))
        # Lightning's own plugin keeps a GradScaler's state under its name.
        others = [checkpoint[name] for name in (*bases, "MixedPrecision") if checkpoint.get(name)]
        if own not in checkpoint and others:
            self.load_state_dict(others[0])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process converts its own copy of the model.
        running = ("_engine", "_module", "_optimizers", "_gate", "_averaging", "_exposes_gradients", "_update")
        return {key: value for key, value in self.__dict__.items() if key not in running}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
