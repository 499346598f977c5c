"""The body of a model summary that knows dtypes; see `lightning_apex.plugins.namespace`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_apex.plugins.namespace import TrainerNamespace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelSummary
else:
    ModelSummary = object

Column = tuple[str, list[str]]


class ApexModelSummaryBody(ModelSummary):
    """Lightning's model summary with the dtypes in which a model trains: ``Trainer(callbacks=[ApexModelSummary()])``.

    It takes the place of the Trainer's own summary. A column names the dtypes of each layer's parameters; the sums say
    how many parameters there are in each dtype, and how many have an fp32 master beside them; the size counts each
    parameter with the bytes it has, masters included.

    Args:
        max_depth: Down to which depth submodules are listed; -1 for all, 0 for no summary.
        rich: Whether to print with rich; ``None`` for doing so where it is installed, as the Trainer does.
    """

    _lightning: TrainerNamespace

    def __init__(self, max_depth: int = 1, rich: bool | None = None) -> None:
        if rich and find_spec("rich") is None:
            raise ModuleNotFoundError(
                "ApexModelSummary(rich=True) needs rich: run `pip install rich`, or leave it out."
            )
        super().__init__(max_depth)
        self.rich = find_spec("rich") is not None if rich is None else rich

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lightning.refuse_stranger(trainer, type(self).__name__)
        if not self._max_depth:
            return
        summary = self._lightnings_summary(trainer, pl_module)
        columns: list[Column] = summary._get_summary_data()
        columns.insert(4, ("Dtype", _dtypes_of_rows(pl_module, dict(columns)["Name"])))
        if not trainer.is_global_zero:
            return
        masters = getattr(trainer.precision_plugin, "masters", None)
        counts = _count(pl_module.parameters())
        mastered = sum(p.numel() for p in pl_module.parameters() if masters is not None and p in masters)
        size = sum(count * dtype.itemsize for dtype, count in counts.items()) + mastered * torch.float32.itemsize
        sums = {f"{_short(dtype)} params": count for dtype, count in counts.items()}
        if mastered:
            sums["float32 master weights"] = mastered
        totals = (summary.total_parameters, summary.trainable_parameters, size / 1e6, summary.total_training_modes)
        if self.rich:
            self._print_rich(columns, sums, *totals, summary.total_flops)
            return
        self.summarize(columns, *totals, total_flops=summary.total_flops)
        rank_zero_info("\n".join(f"{self._lightning.human_count(n):<10}{what}" for what, n in sums.items()))

    def _lightnings_summary(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        example = pl_module.example_input_array
        converted = trainer.precision_plugin.convert_input(example)
        try:
            if converted is not example:  # Lightning would hand it to a half model as it is
                pl_module.example_input_array = converted
            with warnings.catch_warnings():
                # Lightning's guess of the size, which it warns of, is not used.
                warnings.filterwarnings("ignore", "Precision .* is not supported by the model summary")
                return self._summary(trainer, pl_module)
        finally:
            if converted is not example:
                pl_module.example_input_array = example

    def _print_rich(
        self,
        columns: list[Column],
        sums: dict[str, int],
        total: int,
        trainable: int,
        size: float,
        modes: dict[str, int],
        flops: int,
    ) -> None:
        from rich import get_console
        from rich.table import Table

        table = Table(header_style="bold magenta")
        for title, _ in columns:
            table.add_column(title, justify="right" if title in ("Params", "FLOPs") else "left")
        for row in zip(*(cells for _, cells in columns), strict=True):
            table.add_row(*row)
        counts = {
            "Trainable params": trainable,
            "Non-trainable params": total - trainable,
            "Total params": total,
        } | sums
        lines = {what: self._lightning.human_count(count) for what, count in counts.items()}
        lines["Total estimated model params size (MB)"] = f"{size:,.3f}"
        lines |= {"Modules in train mode": f"{modes['train']}", "Modules in eval mode": f"{modes['eval']}"}
        lines["Total FLOPs"] = self._lightning.human_count(flops)
        get_console().print(table, *(f"[bold]{what}[/]: {text}" for what, text in lines.items()), sep="\n")


def _dtypes_of_rows(module: LightningModule, names: list[str]) -> list[str]:
    """The dtypes of each row's parameters; a row that is no submodule stands for those of no other row."""
    submodules = dict(module.named_modules())
    listed = {param for name in names if name in submodules for param in submodules[name].parameters()}
    rest = [param for param in module.parameters() if param not in listed]
    rows = [submodules[name].parameters() if name in submodules else rest for name in names]
    return [", ".join(_short(dtype) for dtype in _count(params)) or "-" for params in rows]


def _count(params: Iterable[Tensor]) -> dict[torch.dtype, int]:
    """How many elements there are in each dtype, the commonest first."""
    counts: Counter[torch.dtype] = Counter()
    for param in params:
        if not isinstance(param, UninitializedParameter):
            counts[param.dtype] += param.numel()
    return dict(counts.most_common())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
