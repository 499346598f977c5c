"""A checkpoint's contents on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_apex.cli.converting.inspection import Checkpoint, Sizes

_NAMES = 5


def show(checkpoint: Checkpoint, console: Console) -> None:
    """Prints what it holds, then what was noticed."""
    from rich import box
    from rich.table import Table

    facts = [f"written by {checkpoint.kind}"]
    facts += [f"Lightning {checkpoint.written_by}"] if checkpoint.written_by else []
    facts += [f"epoch {checkpoint.epoch}"] if checkpoint.epoch is not None else []
    facts += [f"step {checkpoint.global_step}"] if checkpoint.global_step is not None else []
    table = Table(title=f"{checkpoint.path}: {', '.join(facts)}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("what", "where", "tensors", "of it"):
        table.add_column(heading, overflow="fold")
    for weights in checkpoint.weights:
        table.add_row("weights", weights.place or "(the file)", amount(weights.by_dtype), "")
    for state in checkpoint.optimizers:
        about = [state.looks_like, f"{state.parameters} parameters"]
        about += [f"step {state.step:g}"] if state.step is not None else []
        about += [f"{state.masters} fp32 masters"] if state.masters else []
        about += ["in Apex's layout"] if state.layout == "Apex" else []
        table.add_row("optimizer", state.place, amount(state.by_dtype), ", ".join(about))
    for scale in checkpoint.scales:
        table.add_row("loss scale", scale.place, "", f"{scale.value:g}, {scale.good_steps} good steps")
    console.print(table)
    for sentence in sentences(checkpoint):
        console.print(f"- {sentence}", markup=False, highlight=False)
    if checkpoint.written is not None:
        console.print(f"wrote {checkpoint.written}", markup=False, style="bold")


def sentences(checkpoint: Checkpoint) -> list[str]:
    """What people should notice."""
    result = []
    for weights in checkpoint.weights:
        if weights.not_finite:
            result.append(f"not finite: {listed(weights.not_finite)}.")
        if weights.beyond_fp16:
            result.append(
                f"fp16 would make inf of values in {listed(weights.beyond_fp16)}: use O4 or O5, or keep_fp32."
            )
    return [*result, *checkpoint.notes]


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def amount(by_dtype: Mapping[str, Sizes]) -> str:
    """``12 float32 (3.1 MB)``, a part for each dtype."""
    return ", ".join(f"{size.tensors} {dtype} ({_bytes(size.bytes)})" for dtype, size in by_dtype.items()) or "none"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"
