"""What is measured: the shapes of a user's model, of its BatchNorms, its training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_apex.cli.benching import shapes
from lightning_apex.cli.errors import CommandError, one_sentence

if TYPE_CHECKING:
    from lightning_apex.cli.configs import Training

BUILT_IN = {"resnet50": shapes.resnet50, "gpt2-small": shapes.gpt2_small}
NormInput = tuple[tuple[int, ...], torch.memory_format]  # of a BatchNorm: shape and layout


def parameter_shapes(model: str | None, training: Training | None) -> shapes.Shapes:
    """The shapes of the trainable parameters.

    Raises:
        CommandError: If there are none.
    """
    if training is None and model in BUILT_IN:
        return BUILT_IN[model]()
    module = training.model if training is not None else made(model)
    _configure(module)
    found = [tuple(p.shape) for p in module.parameters() if p.requires_grad]
    if not found:
        raise CommandError(f"{type(module).__name__} has no trainable parameters: there is nothing to step.")
    return found


def made(name: str | None) -> nn.Module:
    """The module that ``package:Name`` makes without arguments; ``torchvision:resnet50`` means that of its models.

    Raises:
        CommandError: If it cannot be made.
    """
    from lightning_apex.cli.sections import find_modules, object_named

    if name is None:
        raise CommandError("there is nothing to measure: give --model or --config.")
    package, _, attribute = name.partition(":")
    if package == "torchvision" and attribute:
        make = _of_torchvision(attribute)
    else:
        if ":" not in name:
            raise CommandError(
                f"model={name!r} is not known: use {', '.join(BUILT_IN)}, torchvision:NAME or package.module:Class."
            )
        find_modules(None)
        make = object_named("model", name)
    try:
        module = make()
    except Exception as error:
        raise CommandError(f"model={name!r} cannot be made without arguments: {one_sentence(error, 200)}.") from error
    if not isinstance(module, nn.Module):
        raise CommandError(f"model={name!r} makes a {type(module).__name__}, and must make a torch.nn.Module.")
    return module


def _of_torchvision(name: str) -> Any:
    try:
        models = importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # beside another torch than its own it raises RuntimeError
        raise CommandError(
            f"model='torchvision:{name}' needs torchvision, which cannot be imported here "
            f"({one_sentence(error, 100)}): install it, or use {' or '.join(BUILT_IN)}."
        ) from error
    make = getattr(models, name, None)
    if not callable(make) or isinstance(make, type(models)):
        raise CommandError(f"model='torchvision:{name}': torchvision.models has no {name!r}.")
    return make


def _configure(module: nn.Module) -> None:
    """A LightningModule makes some of its layers only when asked."""
    from lightning.pytorch import LightningModule

    if isinstance(module, LightningModule):
        try:
            module.configure_model()
        except Exception as error:
            raise CommandError(f"configure_model of {type(module).__name__} raised: {one_sentence(error)}.") from error


def norm_inputs(model: str | None, training: Training | None, input_shape: tuple[int, ...]) -> list[NormInput]:
    """Shape and layout of what each BatchNorm of a model gets in a forward pass.

    Raises:
        CommandError: If there are none, or the forward pass fails.
    """
    module = training.model if training is not None else made(model)
    found: list[NormInput] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        [x] = inputs
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        found.append((tuple(x.shape), torch.channels_last if last else torch.contiguous_format))

    handles = [m.register_forward_pre_hook(note) for m in module.modules() if isinstance(m, _BatchNorm)]
    if not handles:
        raise CommandError(f"{type(module).__name__} has no BatchNorm: give another --model.")
    try:
        if training is not None:
            _one_step(training)
        else:
            with torch.no_grad():
                module(torch.randn(input_shape))
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(
            f"a forward pass of {type(module).__name__} failed, with inputs of shape {input_shape}: "
            f"{one_sentence(error, 200)}; give another --input_shape."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise CommandError(f"no BatchNorm of {type(module).__name__} took part in its forward pass.")
    return found


def _one_step(training: Training) -> None:
    from lightning.pytorch import Trainer

    from lightning_apex.cli.configs import quiet_lightning
    from lightning_apex.cli.sections import said

    try:
        with quiet_lightning():
            Trainer(**training.trainer, max_steps=1, max_epochs=-1).fit(training.model, datamodule=training.data)
    except Exception as error:
        raise CommandError(f"a training step of {type(training.model).__name__} failed: {said(error)}.") from error
