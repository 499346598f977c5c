"""The result of ``lightning-apex doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_apex.cli.doctoring.findings import Finding, GroupResult, KernelResult

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}


@dataclass
class Diagnosis:
    """What was looked at on this machine.

    Attributes:
        findings: In the order in which they were made.
        kernels: Every kernel that was run.
        rates: Floating-point operations a second by device, operation and type; None where torch cannot do it.
        groups: Every try of processes that sum a tensor.
        extension: `lightning_apex.build_info`; empty where the extension does not load.
    """

    findings: list[Finding] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    rates: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    groups: list[GroupResult] = field(default_factory=list)
    extension: dict[str, Any] = field(default_factory=dict)

    def of(self, *statuses: str) -> list[Finding]:
        """Findings with one of these statuses."""
        return [finding for finding in self.findings if finding.status in statuses]

    @property
    def exit_code(self) -> int:
        """1 where something is bad."""
        return int(bool(self.of("bad")))

    def as_json(self) -> Any:
        """Everything."""
        return {"status": self.status, **self.__dict__}

    @property
    def status(self) -> str:
        """The worst finding's."""
        return next((status for status in ("bad", "warn") if self.of(status)), "ok")

    def show(self, console: Console) -> None:
        """Prints a line a finding, and what mends it."""
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        for finding in self.findings:
            mark, color = _MARKS[finding.status]
            table.add_row(f"[{color}]{mark}[/]", finding.check, _plain(finding.seen))
            if finding.mend is not None:
                table.add_row("", "", _plain(f"→ {finding.mend}", "bold"))
        console.print(table)
        self._show_rates(console)
        bad, warned = len(self.of("bad")), len(self.of("warn"))
        if not bad and not warned:
            console.print("\nAll is well.")
        else:
            parts = [f"{bad} bad"] * bool(bad) + [f"{warned} to look at"] * bool(warned)
            console.print(f"\n{', '.join(parts)} of {len(self.findings)}.")

    def _show_rates(self, console: Console) -> None:
        from rich.table import Table

        for where, ops in self.rates.items():
            dtypes = list(next(iter(ops.values()), {}))
            table = Table(title=f"{where}: GFLOP/s", title_justify="left", box=None, padding=(0, 2, 0, 0))
            table.add_column("")
            for dtype in dtypes:
                table.add_column(dtype, justify="right")
            for op, rates in ops.items():
                table.add_row(op, *(_gigas(rates[dtype]) for dtype in dtypes))
            console.print()
            console.print(table)


def _gigas(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:,.0f}" if rate >= 1e10 else f"{rate / 1e9:.2g}"


def _plain(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(text, style)


def rates_by_name(measured: Mapping[tuple[str, str], float | None]) -> dict[str, dict[str, float | None]]:
    """Rates by operation, then by type."""
    result: dict[str, dict[str, float | None]] = {}
    for (op, dtype), rate in measured.items():
        result.setdefault(op, {})[dtype] = rate
    return result
