"""The functions of the functional API."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_apex import passes
from lightning_apex.amp import context as contexts
from lightning_apex.amp import stepping
from lightning_apex.amp.arguments import (
    check_enabled,
    check_loss_id,
    checked_models,
    checked_optimizers,
    level_of,
    output_dtype,
    positive_count,
    refuse_closure_driven,
    summary,
)
from lightning_apex.amp.context import Context
from lightning_apex.amp.forward import ForwardHooks, disable_casts
from lightning_apex.amp.states import checked_states, scaler_state
from lightning_apex.cast_copies import is_cast_copy, restore_copy
from lightning_apex.engine import PrecisionEngine
from lightning_apex.scaler import LossScaler


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_dtype: str | torch.dtype | None = None,
    keep_fp32: Sequence[str | type] = (),
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    max_consecutive_skips: int | None = 50,
) -> Any:
    """Prepares models and optimizers for training at an opt level; see `lightning_apex.ApexPrecision` for the levels.

    Models are cast in place and get forward hooks: they run under ``torch.autocast`` where the level asks for it, and
    their outputs are fp32. Optimizers get step hooks; their ``param_groups`` keep the models' own parameters. Wrap
    models in DistributedDataParallel afterwards. Called again on any of the same objects, it undoes its earlier work
    on all that were initialised together, and begins anew.

    Args:
        models: A module, or a list of them.
        optimizers: An optimizer or a list of them, of any kind; ``None`` for inference.
        enabled: False makes this and all other functions do nothing.
        opt_level: ``"O0"`` to ``"O5"``.
        cast_model_type: The half type of O2, O3 and O5, as ``half_dtype``.
        patch_torch_functions: Accepted for old code. Nothing is patched: O1 and O4 use ``torch.autocast``.
        keep_batchnorm_fp32: Whether modules with running statistics stay in fp32; also ``"True"`` or ``"False"``.
        master_weights: Whether optimizers update fp32 copies of half weights.
        loss_scale: A fixed factor, also as a string, or ``"dynamic"``.
        cast_model_outputs: What floating-point outputs of the models are cast to; fp32 by default.
        num_losses: How many losses have a scale of their own; see ``loss_id`` of `scale_loss`.
        verbosity: 0 prints nothing and warns of nothing.
        min_loss_scale: The floor of a dynamic scale; 2**-10 by default.
        max_loss_scale: The ceiling of a dynamic scale.
        half_dtype: ``"float16"``, ``"bfloat16"`` or the torch dtype; by default the level's own, on a CPU bfloat16.
        keep_fp32: Module name patterns (``"encoder.*.norm"``) or classes that compute in fp32, with fp32 weights.
        init_scale: The first dynamic loss scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: What the scale is multiplied by at an overflow.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Overflows tolerated before the scale backs off.
        max_consecutive_skips: After so many skipped steps in a row ``optimizer.step()`` raises `LossScaleError`.

    Returns:
        The same objects: models, or ``(models, optimizers)`` if optimizers were given; each as a list if it was one.

    Raises:
        OptLevelError: If the level is unknown, or an argument contradicts it.
        ValueError: If a model cannot be cast or another argument is invalid; nothing has changed then.
        TypeError: If a model is no module or an optimizer is none.
    """
    check_enabled(enabled)
    model_list, optimizer_list = checked_models(models), checked_optimizers(optimizers)
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        for old in contexts.existing(model_list, optimizer_list):
            old.release()
        contexts.disable([*model_list, *optimizer_list])
        return result
    level = level_of(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        half_dtype=half_dtype,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    outputs = output_dtype(cast_model_outputs, level)
    scaler = LossScaler(
        level.loss_scale,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_loss_scale=2.0**-10 if min_loss_scale is None else min_loss_scale,
        max_loss_scale=max_loss_scale,
        max_consecutive_skips=max_consecutive_skips,
    )
    scalers = [scaler, *(copy.deepcopy(scaler) for _ in range(1, positive_count("num_losses", num_losses)))]
    device = next((p.device.type for model in model_list for p in model.parameters()), "cpu")
    here = level.on(device)
    refuse_closure_driven(optimizer_list, here)
    engine = PrecisionEngine(here, scaler, (keep_fp32,) if isinstance(keep_fp32, str | type) else keep_fp32)
    _undo_earlier(engine, model_list, optimizer_list)
    started = Context(engine, scalers, verbosity)
    started.start(model_list, optimizer_list, device, outputs)
    if here.half_dtype is not level.half_dtype and verbosity > 0:
        warnings.warn(
            f"amp.initialize(opt_level={level.name!r}) uses bfloat16 instead of float16 on a CPU, where float16 is "
            "very slow: give half_dtype='bfloat16' to agree, or half_dtype='float16' to insist.",
            stacklevel=2,
        )
    started.say(f"amp: {summary(here)}")
    return result


def _undo_earlier(engine: PrecisionEngine, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Undoes earlier casts of these models, once the new one is known to work."""
    old = contexts.existing(models, optimizers)
    cast_already = [m for m in models if is_cast_copy(m) or any(m in context.models for context in old)]
    engine.check(models, cast_already)
    for context in old:
        context.release()
    for model in models:
        restore_copy(model, ForwardHooks)


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | Sequence[nn.Module] | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scales a loss for its backward pass: ``with amp.scale_loss(loss, optimizer) as scaled_loss: ...``.

    On the way out gradients are unscaled, in ``param.grad`` or, at levels with masters, where `master_params` shows
    them. If one is not finite, the next ``step()`` of each of the optimizers changes nothing, and the scale backs off.

    Gradients that are there when the block begins are added to the new ones: zero them before it, not inside.

    Args:
        loss: What the forward pass computed.
        optimizers: The optimizers whose parameters get gradients from this loss.
        loss_id: Which of the ``num_losses`` scales to use.
        model: Accepted for old code.
        delay_unscale: Leaves gradients scaled, to accumulate those of more losses: give it in all but the last of the
            backward passes that belong to one step. Accumulating without it is right, too, and takes an fp32 copy.
        delay_overflow_check: Accepted for old code. A step waits for the check, which stalls no device.

    Raises:
        RuntimeError: If an optimizer was not initialised, or is in another `scale_loss` already.
        ValueError: If ``loss_id`` is out of range, or there is no optimizer.
    """
    given = [optimizers] if not isinstance(optimizers, list | tuple) else list(optimizers)
    hooks = [contexts.of_optimizer(optimizer, "amp.scale_loss()") for optimizer in given]
    known = list({id(h): h for h in hooks if h is not None}.values())
    if not given:
        raise ValueError("amp.scale_loss() got no optimizer: give those whose parameters the loss trains.")
    if not isinstance(loss, Tensor):
        raise TypeError(f"amp.scale_loss() got a {type(loss).__name__} as loss: give a tensor.")
    if not known:
        yield loss
        return
    context = the_context_of(known)
    check_loss_id(loss_id, len(context.scalers))
    context.heal()
    if not context.scalers[loss_id].is_enabled():
        for step_hooks in known:
            if not step_hooks.gradients.busy:
                step_hooks.gradients.take_edits()
        with context.engine.backward_context():
            yield loss
        return
    for step_hooks in known:
        if step_hooks.gradients.busy:
            raise RuntimeError(
                f"amp.scale_loss() was entered twice for one {type(step_hooks.gradients.optimizer).__name__}: add the "
                "losses, or leave the first block before the second begins."
            )
        step_hooks.come_last()
    scaled = context.scaled(loss, [h.gradients for h in known], loss_id, delay_unscale)
    with scaled as scaled_loss, context.engine.backward_context():
        yield scaled_loss


def the_context_of(hooks: Sequence[stepping.StepHooks]) -> Context:
    """The context that all these optimizers belong to."""
    if any(h.context is not hooks[0].context for h in hooks):
        raise RuntimeError(
            "amp.scale_loss() got optimizers of several calls of amp.initialize(): initialise together what one loss "
            "trains, amp.initialize(models, [optimizer1, optimizer2])."
        )
    return hooks[0].context


@contextmanager
def autocast(of: nn.Module | Optimizer | None = None, *, enabled: bool = True) -> Iterator[None]:
    """What forward passes of initialised models run in by themselves, for losses and other code outside a model.

    Args:
        of: A model or optimizer, to choose where `initialize` was called more than once at different levels.
        enabled: False is `disable_casts`.
    """
    passes.heal()
    if not enabled:
        inside: AbstractContextManager[Any] = disable_casts()
    else:
        inside = contexts.forward_context_of(of)
    with inside:
        yield


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The fp32 tensors that an optimizer updates, with their unscaled gradients: what to clip.

    At levels with masters these are the masters, elsewhere the model's own parameters. Gradients may be edited or
    replaced; the next step uses them.
    """
    hooks = stepping.hooks_of(optimizer)
    if hooks is None:
        return (p for group in optimizer.param_groups for p in group["params"])
    hooks.heal()
    return iter(hooks.gradients.show())


def hold_schedulers(*schedulers: LRScheduler) -> None:
    """Lets learning-rate schedulers stand still while all steps of their optimizer are skipped.

    ``scheduler.step()`` does nothing then: the first, overflowing steps use up no warm-up. Schedulers that follow a
    metric are left alone. Until `initialize` is called again.

    Args:
        *schedulers: Schedulers of initialised optimizers.

    Raises:
        RuntimeError: If an optimizer was not initialised.
    """
    hooks = [contexts.of_optimizer(scheduler.optimizer, "amp.hold_schedulers()") for scheduler in schedulers]
    for scheduler, step_hooks in zip(schedulers, hooks, strict=True):
        if step_hooks is not None:
            step_hooks.gate.watch([scheduler])


def state_dict(of: nn.Module | Optimizer | None = None) -> dict[str, Any]:
    """The state of all loss scales, keyed ``loss_scaler0``, ``loss_scaler1``, ...

    Args:
        of: A model or optimizer, to choose where `initialize` was called more than once.
    """
    context = contexts.the_one(of, "amp.state_dict()")
    return {} if context is None else {f"loss_scaler{i}": scaler_state(s) for i, s in enumerate(context.scalers)}


def load_state_dict(state_dict: dict[str, Any], of: nn.Module | Optimizer | None = None) -> None:
    """Takes over what `state_dict` returned here, or Apex's ``amp.state_dict()``.

    Args:
        state_dict: One dictionary for each of the ``num_losses`` losses.
        of: A model or optimizer, to choose where `initialize` was called more than once.

    Raises:
        ValueError: If the number of losses is another, or an entry is not known; nothing has changed then.
    """
    context = contexts.the_one(of, "amp.load_state_dict()")
    if context is None:
        if not contexts.any_disabled():
            raise RuntimeError("amp.load_state_dict() came before amp.initialize(): there is nothing to load into.")
        return
    states = checked_states(state_dict, context.scalers)
    for loss_id, (scaler, state) in enumerate(zip(context.scalers, states, strict=True)):
        scaler.load_state_dict(state)
        context.moves[loss_id] += 1
