"""``lightning-apex bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning_apex.cli.benching.benchmark import Benchmark, Line
from lightning_apex.cli.errors import CommandError

if TYPE_CHECKING:
    from lightning_apex.cli.configs import Training
    from lightning_apex.cli.output import Bars

_DTYPES = ("float32", "bfloat16", "float16")


def run_benchmark(
    what: Literal["optimizers", "batchnorm", "step"],
    model: str | None = None,
    config: str | None = None,
    data: str | None = None,
    optimizers: Sequence[str] = ("AdamW", "SGD", "LAMB"),
    levels: Sequence[str] = ("O0", "O1", "O2", "O4", "O5"),
    input_shape: Sequence[int] = (8, 3, 224, 224),
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    rounds: int = 9,
    steps: int = 20,
    threads: int | None = None,
    accelerator: Literal["cpu", "gpu"] | None = None,
    out: str | None = None,
) -> Benchmark:
    """Times optimizers, batch norm or whole training steps on your model's shapes, ours beside what is installed.

    Contenders take turns in one process; figures are medians, and ratios are taken within a round. The roofline is what
    memory takes for the bytes that ours moves, measured in the same rounds.

    Args:
        what: optimizers (steps on its parameters), batchnorm (its BatchNorms, forward and backward) or step (training).
        model: resnet50, gpt2-small, torchvision:NAME, package.module:Class or file.py:Class.
        config: A config.yaml as LightningCLI reads and writes it, instead of a model.
        data: package.module:Class of a LightningDataModule, for step, where the model has no data.
        optimizers: Of AdamW, SGD, Adagrad, Lion, LAMB, NovoGrad, LARS.
        levels: Opt levels for step.
        input_shape: Of what the model gets, for batchnorm without a config.
        dtype: Of BatchNorm's input.
        rounds: How often each contender has its turn.
        steps: Training steps in a turn, after a quarter as many to warm up.
        threads: CPU threads; torch's number if not given.
        accelerator: cpu or gpu; a GPU where there is one, if not given.
        out: A folder for WHAT.json and WHAT.png; without it nothing is written.

    Returns:
        Times, ratios and shares of the roofline.

    Raises:
        CommandError: If the input cannot be used.
    """
    _check(what, optimizers, levels, input_shape, dtype, rounds=rounds, steps=steps, threads=threads)
    from lightning_apex.cli import output
    from lightning_apex.cli.benching.machine import machine
    from lightning_apex.cli.benching.race import settle

    if out is not None:
        output.writable_folder(out)
    device = _device(accelerator)
    if model is None and config is None and what != "step":
        model = "resnet50" if what == "optimizers" else None
    make = _maker(what, model, config, data, device)

    import torch

    settle(threads or torch.get_num_threads())
    with output.progress() as bars:
        if what == "optimizers":
            lines, notes = _optimizers(model, make, optimizers, rounds, device, bars)
        elif what == "batchnorm":
            lines, notes = _batchnorm(model, make, tuple(input_shape), dtype, rounds, device, bars)
        else:
            lines, notes = _steps(make, levels, steps, rounds, device, bars)
    reference = lines[0].name
    result = Benchmark(what, config or model or "", rounds, lines, machine(), notes, reference)
    if out is not None:
        result.save(out)
    return result


def _check(
    what: str, optimizers: Sequence[str], levels: Sequence[str], shape: Sequence[int], dtype: str, **counts: int | None
) -> None:
    from lightning_apex.cli.benching.families import FAMILIES
    from lightning_apex.levels import LEVELS

    for name, value in counts.items():
        if value is not None and value < 1:
            raise CommandError(f"{name}={value} is too few: give 1 or more.")
    choices: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
        ("what", [what], ("optimizers", "batchnorm", "step")),
        ("optimizers", optimizers, tuple(FAMILIES)),
        ("levels", levels, tuple(LEVELS)),
        ("dtype", [dtype], _DTYPES),
    )
    for name, given, known in choices:
        unknown = [value for value in given if value not in known]
        if unknown or not given:
            raise CommandError(f"{name}: {unknown[0] if unknown else '(none)'} is not known: use {', '.join(known)}.")
    if any(size < 1 for size in shape):
        raise CommandError(f"input_shape={list(shape)} has no elements: give sizes of 1 or more.")


def _device(accelerator: str | None) -> Any:
    import torch

    there = torch.cuda.is_available()
    if accelerator == "gpu" and not there:
        raise CommandError("accelerator='gpu', but torch sees no GPU here: use --accelerator cpu.")
    return torch.device("cuda" if there and accelerator != "cpu" else "cpu")


def _maker(
    what: str, model: str | None, config: str | None, data: str | None, device: Any
) -> Callable[[], Training] | None:
    """Makes the training that a config, or for ``step`` a model, stands for."""
    if config is None and what != "step":
        if data is not None:
            raise CommandError(f"data={data!r} is of use for step, or beside a config: leave it out.")
        return None
    from lightning_apex.cli.configs import load_training

    accelerator = "gpu" if device.type == "cuda" else "cpu"
    return lambda: load_training(config, model, data, accelerator=accelerator)


def _optimizers(
    model: str | None,
    make: Callable[[], Training] | None,
    names: Sequence[str],
    rounds: int,
    device: Any,
    bars: Bars,
) -> tuple[list[Line], list[str]]:
    from lightning_apex.cli.benching.rows import optimizer_row
    from lightning_apex.cli.benching.subjects import parameter_shapes

    shapes = parameter_shapes(model, make() if make is not None else None)
    bar = bars.add("optimizers", total=len(names))
    lines: list[Line] = []
    notes: list[str] = []
    for name in names:
        bar.update(note=name)
        more, words = optimizer_row(name, shapes, rounds, device)
        lines, notes = [*lines, *more], [*notes, *words]
        bar.advance()
    return lines, notes


def _batchnorm(
    model: str | None,
    make: Callable[[], Training] | None,
    shape: tuple[int, ...],
    dtype: str,
    rounds: int,
    device: Any,
    bars: Bars,
) -> tuple[list[Line], list[str]]:
    import torch

    from lightning_apex.cli.benching.rows import norm_rows
    from lightning_apex.cli.benching.subjects import norm_inputs

    inputs = norm_inputs(model, make() if make is not None else None, shape)
    bar = bars.add("batchnorm", total=None)
    result = norm_rows(inputs, getattr(torch, dtype), rounds, device)
    bar.update(1, total=1)
    return result


def _steps(
    make: Callable[[], Training] | None,
    levels: Sequence[str],
    steps: int,
    rounds: int,
    device: Any,
    bars: Bars,
) -> tuple[list[Line], list[str]]:
    from lightning_apex.cli.benching.steps import native_precisions, time_steps

    assert make is not None
    make()  # what is wrong with it is said before anything is timed
    natives = native_precisions(device.type)
    bar = bars.add("training", total=rounds * (len(levels) + len(natives)))
    return time_steps(make, levels, natives, steps, rounds, bar)
