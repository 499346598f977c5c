"""What the GPU benchmarks share: races by the device's clock and by the host's, and their command line.

`--device cpu` runs all of it on small tensors of a machine without a GPU: to see that it runs, no more.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.common import Contender, Options, Race, Result, parse_options, race
from benchmarks.report import Report

Row = Callable[[str, Report], None]
Goals = tuple[float, float]


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tidy(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def wall_race(contenders: Sequence[Contender], options: Options, device: str) -> Race:
    """From an idle device to an idle device: what the host does counts."""
    return race(contenders, options.rounds, sync=lambda: sync(device), keep_all=True, pause=0.0)


def _turns(
    contenders: Sequence[Contender], rounds: int, sample: Callable[[Contender], float], warm_up: int = 2
) -> Race:
    result = Race({contender.name: [] for contender in contenders}, keep_all=True)
    for turn in range(rounds + warm_up):
        for i in range(len(contenders)):
            contender = contenders[(i + turn) % len(contenders)]
            if contender.prepare is not None:
                contender.prepare()
            seconds = sample(contender)
            if turn >= warm_up:
                result.seconds[contender.name].append(seconds)
    result.others = [0.0] * rounds
    return result


def device_race(contenders: Sequence[Contender], options: Options, device: str) -> Race:
    """The device's time alone: while it sleeps, the host queues the whole step."""

    def sample(contender: Contender) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(50_000_000)  # clock ticks: some 25 ms
        start.record()
        contender.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return _turns(contenders, options.rounds, sample) if device == "cuda" else host_race(contenders, options, device)


def host_race(contenders: Sequence[Contender], options: Options, device: str) -> Race:
    """The host's time alone: until the whole step is queued."""

    def sample(contender: Contender) -> float:
        sync(device)
        start = time.perf_counter()
        contender.run()
        seconds = time.perf_counter() - start
        sync(device)
        return seconds

    return _turns(contenders, options.rounds, sample)


def over(row: str, result: Race, peer: str, ours: str = "ours", goals: Goals | None = None) -> Result:
    must, stretch = goals or (None, None)
    return Result(row, f"× {peer}", result.ratio(peer, ours), must, stretch)


def run_rows(
    name: str, doc: str | None, rows: Callable[[bool, str], Mapping[str, Row]], argv: Sequence[str] | None
) -> int:
    """The command of a GPU benchmark: makes the rows that are asked for, and writes NAME.json."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given, rest = first.parse_known_args(sys.argv[1:] if argv is None else argv)
    device: str = given.device
    if device == "cpu":
        rest = ["--quick", *rest]
    options = parse_options(doc, list(rows(True, "cpu")), rest)
    if device == "cuda" and not torch.cuda.is_available():
        print(
            f"benchmarks.{name} needs a CUDA GPU and a CUDA build of torch, and finds none here; --device cpu only "
            "shows that it runs.",
            file=sys.stderr,
        )
        return 2
    report = Report(name, options)
    for row, run in rows(options.quick, device).items():
        if options.wants(row):
            run(row, report)
            report.save()
            tidy(device)
    report.close()
    return 0
