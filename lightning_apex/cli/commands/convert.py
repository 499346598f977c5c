"""``lightning-apex convert``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_apex.cli.converting.inspection import Checkpoint
from lightning_apex.cli.errors import CommandError

if TYPE_CHECKING:
    from lightning_apex.cli.converting.parts import Parts


def convert_checkpoint(
    checkpoint: str,
    output: str | None = None,
    to: Literal["O0", "O1", "O2", "O3", "O4", "O5"] | None = None,
    state_dict_only: bool = False,
    torch_optimizer: bool = False,
    key: str | None = None,
    strip_prefix: str | None = None,
    unsafe: bool = False,
) -> Checkpoint:
    """Shows what a checkpoint of Lightning, Apex, this package or a torch loop holds, and writes it in another form.

    Without an output it only looks. With one, say what to write: to, state_dict_only or torch_optimizer. Nothing is
    ever overwritten, and a file that is there is whole.

    Args:
        checkpoint: A checkpoint file, or a folder of torch.distributed.checkpoint.
        output: The file to write, which must not exist.
        to: Write it as a run at this level would have: fp32 weights and moments, and the level's loss scale. With
            state_dict_only: fp32 weights alone, the same for every level.
        state_dict_only: Write the weights alone, for load_state_dict of a plain torch module; in the types that the
            checkpoint holds, or in fp32 where to is given or the checkpoint is Apex's with fp32 masters.
        torch_optimizer: Write optimizer states that Apex left behind as torch.optim lays them out.
        key: Which state dict is meant, where a checkpoint holds those of several modules.
        strip_prefix: With state_dict_only: write only names that begin so, such as "model.", without it.
        unsafe: Read Python objects too, which may run code: only for files whose source you trust.

    Returns:
        What the checkpoint holds, and where the new one lies.

    Raises:
        CommandError: If the checkpoint cannot be read or the output not be written.
    """
    _check(output, to, state_dict_only, torch_optimizer, key, strip_prefix)
    from lightning_apex.cli import output as screen
    from lightning_apex.cli.converting import inspection, reading

    path = Path(checkpoint)
    target = None if output is None else reading.free_path(output)
    with screen.progress() as bars:
        bar = bars.add("reading", total=None)
        parts = inspection.load_parts(path, unsafe)
        result = inspection.describe(path, parts)
        bar.update(1, total=1)
        if target is None:
            return result
        made, notes = _made(parts, to, state_dict_only, key, strip_prefix)
        bar = bars.add("writing", total=None)
        _write(target, made)
        bar.update(1, total=1)
    return dataclasses.replace(result, notes=(*result.notes, *notes), written=target)


def _check(
    output: str | None,
    to: str | None,
    state_dict_only: bool,
    torch_optimizer: bool,
    key: str | None,
    prefix: str | None,
) -> None:
    choices = {"to": to is not None, "state_dict_only": state_dict_only, "torch_optimizer": torch_optimizer}
    asked = [name for name, given in choices.items() if given]
    if to is not None:
        from lightning_apex.levels import LEVELS

        if to not in LEVELS:
            raise CommandError(f"to={to!r} is no opt level: use one of {', '.join(LEVELS)}.")
    if output is None and asked:
        raise CommandError(f"{asked[0]} writes a checkpoint: add --output FILE.")
    if output is not None and not asked:
        raise CommandError(
            "output is given, but not what to write: add --to LEVEL, --state_dict_only or --torch_optimizer."
        )
    for name, value in (("key", key), ("strip_prefix", prefix)):
        if value is not None and not state_dict_only:
            raise CommandError(f"{name}={value!r} chooses among weights: add --state_dict_only.")


def _made(
    parts: Parts, to: str | None, state_dict_only: bool, key: str | None, prefix: str | None
) -> tuple[Any, list[str]]:
    """What to write, and notes."""
    from lightning_apex.cli.converting import changes
    from lightning_apex.levels import LEVELS

    notes: list[str] = []
    if state_dict_only:
        where = _one(parts, key)
        weights: Mapping[str, Any] = parts.weights[where]
        if to is not None or parts.fp16_optimizers:
            weights = changes.weights_in_fp32(parts, notes)[where]
        return _named(weights, prefix, notes), notes
    if to is not None:
        return changes.for_level(parts, LEVELS[to])
    if not (parts.optimizers or parts.fp16_optimizers):
        raise CommandError("torch_optimizer was asked for, but the checkpoint holds no optimizer's state.")
    changed, notes = changes.with_torch_optimizers(parts)
    if parts.fp16_optimizers:
        changed |= changes.weights_in_fp32(parts, notes)
    return changes.replaced(parts.held, changed), notes


def _one(parts: Parts, key: str | None) -> tuple[str | int, ...]:
    """The place of the state dict that is meant."""
    from lightning_apex.cli.converting.parts import label

    places = {label(path): path for path in parts.weights}
    if key is not None and key not in places:
        raise CommandError(f"key={key!r} holds no weights: use one of {', '.join(map(repr, places))}.")
    if key is None and len(places) > 1:
        raise CommandError(
            f"the checkpoint holds {len(places)} state dicts: add --key with one of {', '.join(places)}."
        )
    return places[key] if key is not None else next(iter(places.values()))


def _named(weights: Mapping[str, Any], prefix: str | None, notes: list[str]) -> dict[str, Any]:
    if prefix is None:
        return dict(weights)
    named = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not named:
        raise CommandError(f"strip_prefix={prefix!r} begins no name: they are {', '.join(list(weights)[:5])}, ...")
    if len(named) < len(weights):
        notes.append(f"{len(weights) - len(named)} tensors whose names do not begin with {prefix!r} were left out.")
    return named


def _write(target: Path, made: Any) -> None:
    import torch

    from lightning_apex.cli.converting.reading import write_new

    write_new(target, lambda path: torch.save(made, path))
