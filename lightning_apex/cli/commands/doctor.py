"""``lightning-apex doctor``."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from lightning_apex.cli import output
from lightning_apex.cli.doctoring.diagnosis import Diagnosis, rates_by_name
from lightning_apex.cli.errors import CommandError

Check = Literal["packages", "extension", "kernels", "speed", "processes"]
CHECKS: tuple[Check, ...] = get_args(Check)


def diagnose(checks: Sequence[Check] = CHECKS, seconds: float = 5.0) -> Diagnosis:
    """Looks at this machine: versions, the compiled extension, every kernel, the speed of half types, process groups.

    Every finding comes with the command that mends it. It needs no extension that works: a missing one is a finding.

    Args:
        checks: Some of packages, extension, kernels, speed and processes.
        seconds: For measuring speeds, on each device.

    Returns:
        Findings, and what they were made of.

    Raises:
        CommandError: If an argument cannot be used.
    """
    unknown = [check for check in checks if check not in CHECKS]
    if unknown or not checks:
        raise CommandError(f"checks={list(checks)!r}: give some of {', '.join(CHECKS)}.")
    if not 0 < seconds <= 600:
        raise CommandError(f"seconds={seconds:g} is no time to measure in: give more than 0 and at most 600.")
    return _Doctor(seconds).examine([check for check in CHECKS if check in checks])


class _Doctor:
    """Makes one diagnosis."""

    def __init__(self, seconds: float) -> None:
        from lightning_apex.cli.doctoring import facts

        self._seconds = seconds
        self._extension = facts.extension_facts()
        self._result = Diagnosis(extension=self._extension.info)

    def examine(self, checks: Sequence[str]) -> Diagnosis:
        steps: dict[str, Callable[[output.Bars], None]] = {
            "packages": self._packages,
            "extension": self._look_at_extension,
            "kernels": self._run_kernels,
            "speed": self._measure_speed,
            "processes": self._start_processes,
        }
        with output.progress() as bars:
            for check in checks:
                steps[check](bars)
        return self._result

    def _packages(self, bars: output.Bars) -> None:
        from lightning_apex.cli.doctoring import facts, findings

        self._result.findings += findings.about_packages(facts.package_facts(), platform.python_version())

    def _look_at_extension(self, bars: output.Bars) -> None:
        import torch

        from lightning_apex.cli.doctoring import facts, findings

        found = self._result.findings
        found += findings.about_extension(self._extension, torch.__version__)
        if self._extension.error is None:
            found += findings.about_cpu(facts.cpu_facts())
        found += findings.about_cuda(facts.cuda_facts(), self._extension)

    def _run_kernels(self, bars: output.Bars) -> None:
        from lightning_apex.cli.doctoring import findings, kernels

        if self._extension.error is not None:
            seen = "no kernel can be run without the extension"
            self._result.findings.append(findings.Finding("kernels", "bad", seen, self._extension.command))
            return
        checks, places = kernels.all_checks(), kernels.places(tuple(self._extension.info["cpu_backends"]))
        bar = bars.add("kernels", total=len(checks) * len(places))
        for place in places:
            for check in checks:
                self._result.kernels.append(kernels.run(check, *place))
                bar.advance()
        self._result.findings += findings.about_kernels(self._result.kernels, self._extension.command)

    def _measure_speed(self, bars: output.Bars) -> None:
        import torch

        from lightning_apex.cli.doctoring import findings, speed

        devices = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()
        for device in devices:
            bar = bars.add(f"speed ({device})", total=len(speed.OPS))
            measured: dict[tuple[str, str], float | None] = {}
            for op in speed.OPS:
                measured.update(speed.measure(op, device, self._seconds / len(speed.OPS)))
                bar.advance()
            self._result.rates[str(device)] = rates_by_name(measured)
            known = {key: rate for key, rate in measured.items() if rate is not None}
            self._result.findings += findings.about_speed(str(device), known)

    def _start_processes(self, bars: output.Bars) -> None:
        from lightning_apex.cli.doctoring import findings, groups

        backends = groups.backends()
        if not backends:
            seen = "this torch has no torch.distributed with gloo or NCCL: one process only"
            self._result.findings.append(findings.Finding("processes", "warn", seen))
            return
        bar = bars.add("processes", total=len(backends))
        for backend, processes in backends:
            self._result.groups.append(groups.sum_in_processes(backend, processes))
            bar.advance()
        self._result.findings += findings.about_groups(self._result.groups)
