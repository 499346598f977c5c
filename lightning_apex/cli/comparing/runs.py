"""Trains at each level in a process of its own, one after another, and keeps what has been trained already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_apex.cli.comparing.records import BAD_INPUT, KILLED, Run, read_events, run_of_events
from lightning_apex.cli.comparing.settings import Settings
from lightning_apex.cli.errors import CommandError, one_sentence
from lightning_apex.cli.output import Bar, Bars, json_text, progress

COMMAND = (sys.executable, "-m", "lightning_apex.cli.comparing.child")  # takes a task and where events go
_OF_ALL_RUNS = ("config", "model", "data", "accelerator", "steps", "half_dtype")
_SECONDS_BETWEEN_LOOKS = 0.2


def train_all(settings: Settings, levels: Sequence[str], seeds: Sequence[int], folder: Path) -> list[Run]:
    """Makes all runs that the folder does not hold yet.

    Levels take turns within a seed, so that a machine that is busy for a while slows all of them alike.

    Raises:
        CommandError: If the config, the model or the data cannot be used, which the first run shows.
    """
    runs: list[Run] = []
    with progress() as bars:
        for seed in seeds:
            for level in levels:
                task = {name: getattr(settings, name) for name in _OF_ALL_RUNS}
                task |= {"level": level, "seed": seed, "probes_ranges": level == levels[0] and seed == seeds[0]}
                run = _kept(folder, level, seed, bars) or _trained(task, folder, bars)
                if run.status == BAD_INPUT and not any(earlier.finished for earlier in runs):
                    raise CommandError(run.error)
                runs.append(run)
    return runs


def _name(level: str, seed: int) -> str:
    return f"{level}-seed{seed}"


def _kept(folder: Path, level: str, seed: int, bars: Bars) -> Run | None:
    """A finished run of an earlier time."""
    events = read_events(folder / f"{_name(level, seed)}.jsonl")
    run = run_of_events(level, seed, events)
    if not run.finished:
        return None
    bars.add(f"{level}, seed {seed}", total=run.steps).update(run.steps, note="kept from before")
    return run


def _trained(task: dict[str, Any], folder: Path, bars: Bars) -> Run:
    level, seed = task["level"], task["seed"]
    name = _name(level, seed)
    under_way, done = folder / f".{name}.jsonl", folder / f"{name}.jsonl"
    under_way.unlink(missing_ok=True)
    bar = bars.add(f"{level}, seed {seed}", total=task["steps"])
    with _child(task, under_way, folder / f"{name}.log") as process:
        _follow(process, under_way, bar)
    run = run_of_events(level, seed, read_events(under_way))
    if not run.error and not run.finished:
        run.status, run.error = KILLED, _how_it_died(process.returncode, folder / f"{name}.log")
    bar.update(note=run.error or _last_loss(run))
    if run.finished:
        os.replace(under_way, done)
    else:
        under_way.unlink(missing_ok=True)
    return run


@contextlib.contextmanager
def _child(task: dict[str, Any], events: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process; it is gone when the block is left, however it is left."""
    order = events.with_suffix(".task")
    order.write_text(json_text(task | {"import_paths": [path for path in sys.path if path]}))
    command = [*COMMAND, str(order), str(events)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(_import_paths())}
    try:
        with open(log, "wb") as output:
            # A session of its own: Ctrl-C is for us, and Lightning would take it for an early end.
            process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        order.unlink(missing_ok=True)


def _import_paths() -> list[str]:
    """This package's folder after those the user has set; not an installed one's, which may hold anything."""
    own = Path(__file__).resolve().parents[3]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return list(dict.fromkeys([*given, *([] if own.name in ("site-packages", "dist-packages") else [str(own)])]))


def _follow(process: subprocess.Popen[bytes], events: Path, bar: Bar) -> None:
    """Shows how far the child is until it ends."""
    position = steps = 0
    while True:
        ended = _wait(process)
        if events.exists():
            with events.open("rb") as file:
                file.seek(position)
                fresh = file.read()
            whole = fresh[: fresh.rfind(b"\n") + 1]
            position += len(whole)
            lines = [json.loads(line) for line in whole.splitlines()]
            steps += sum(line["kind"] == "step" for line in lines)
            losses = [line["losses"] for line in lines if line["kind"] == "step"]
            bar.update(steps, note=_note(losses[-1]) if losses else None)
        if ended:
            return


def _wait(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _note(losses: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {float('nan') if value is None else value:.4g}" for name, value in losses.items())


def _last_loss(run: Run) -> str:
    return _note({name: values[-1] for name, values in run.losses.items() if values})


def _how_it_died(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"its process ended with status {code}" + (f": {one_sentence(lines[-1])}" if lines else "")
