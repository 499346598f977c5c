"""The result of ``lightning-apex ranges``: what was counted, what follows, and how it is shown and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.exponents import Exponents
from lightning_apex.cli.probe import KINDS, ModuleExponents, ProbeReport
from lightning_apex.cli.ranging.advice import Advice, advise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_PLAIN = [f.name for f in fields(ModuleExponents) if f.name != "counts"]
_FORMAT = 1


@dataclass
class Ranges:
    """The exponents that a model's values had in fp32, and what fp16 and bf16 would make of them.

    Attributes:
        model: The model's class.
        steps: How many optimizer steps it was trained.
        measured_batches: On how many batches its values were counted.
        report: The counts.
        notes: What was left out of the config.
        versions: Of the packages that took part.
    """

    model: str
    steps: int
    measured_batches: int
    report: ProbeReport
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    _advice: Advice | None = None

    @property
    def advice(self) -> Advice:
        """What follows for fp16."""
        if self._advice is None:
            self._advice = advise(self.report)
        return self._advice

    @property
    def init_scale(self) -> float | None:
        """The loss scale to begin with; None where every one overflows or none can be suggested."""
        return self.advice.init_scale

    @property
    def keep_fp32(self) -> list[str]:
        """For ``ApexPrecision(keep_fp32=...)``."""
        return [keep.pattern for keep in self.advice.keep_fp32]

    @property
    def exit_code(self) -> int:
        """1 where fp16 cannot hold some activation or weight, every loss scale overflows, or evidence is missing."""
        leaves = self.report.first_out_of_range("activations") is not None
        hopeless = self.init_scale is None and self.advice.scales[0].nonzero > 0
        return int(leaves or bool(self.advice.keep_fp32) or hopeless or not self.advice.usable)

    def plot(self, name: str = "") -> Figure:
        """A picture of one module: its exponents, and where fp16 and bf16 end.

        Args:
            name: As in ``named_modules()``.

        Raises:
            CommandError: If there is no such module.
        """
        from lightning_apex.cli.ranging import pictures

        if name not in self.report.modules:
            raise CommandError(f"name={name!r} is no module of {self.model}: use one of report.modules.")
        return pictures.of_module(self.report.modules[name], self.init_scale)

    def plot_scales(self) -> Figure:
        """A picture of how many gradients are flushed or overflow at which loss scale."""
        from lightning_apex.cli.ranging import pictures

        return pictures.of_scales(self.advice.scales, self.init_scale)

    def show(self, console: Console) -> None:
        """Prints a table and what follows from it."""
        from lightning_apex.cli.ranging import table

        table.show(self, console)

    # --- files ------------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Everything, counts included; see `load`."""
        report = self.report
        modules = {
            name: {key: getattr(module, key) for key in _PLAIN}
            | {"counts": {kind: module.counts[kind].to_json() for kind in KINDS}}
            for name, module in report.modules.items()
        }
        return {
            "format": _FORMAT,
            "model": self.model,
            "steps": self.steps,
            "measured_batches": self.measured_batches,
            "versions": self.versions,
            "notes": list(self.notes),
            "init_scale": self.init_scale,
            "keep_fp32": self.keep_fp32,
            "first_activation_out_of_range": report.first_out_of_range("activations"),
            "first_activation_out_of_range_bf16": report.first_out_of_range("activations", torch.bfloat16),
            "advice": asdict(self.advice),
            "forward_order": report.forward_order,
            "backward_order": report.backward_order,
            "modules": modules,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ranges:
        """Reads what `as_json` returned."""
        modules = {
            name: ModuleExponents(
                **{key: row[key] for key in _PLAIN},
                counts={kind: Exponents.from_json(row["counts"][kind]) for kind in KINDS},
            )
            for name, row in data["modules"].items()
        }
        report = ProbeReport(modules, list(data["forward_order"]), list(data["backward_order"]))
        return cls(
            data["model"],
            data["steps"],
            data["measured_batches"],
            report,
            tuple(data["notes"]),
            dict(data["versions"]),
        )

    @classmethod
    def load(cls, path: str | Path) -> Ranges:
        """Reads the ``report.json`` of a folder, or the file itself.

        Raises:
            CommandError: If it cannot be read, or is something else.
        """
        path = Path(path)
        file = path / "report.json" if path.is_dir() else path
        try:
            data = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CommandError(f"path={str(path)!r} is no report: give a folder that `ranges --out` wrote.") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT or "backward_order" not in data:
            raise CommandError(f"path={str(path)!r} holds another report: give a folder that `ranges --out` wrote.")
        return cls.from_json(data)

    def save(self, folder: str | Path) -> None:
        """Writes ``report.json``, ``report.html`` and a picture a module.

        Raises:
            CommandError: If the folder cannot be written.
        """
        from lightning_apex.cli.ranging import page

        page.save(self, folder)
