"""The ``lightning-apex`` program, and what its commands do as Python functions.

Each command is one function here that returns a result: `compare` a `Comparison`, `find_ranges` `Ranges`, `diagnose` a
`Diagnosis`, `run_benchmark` a `Benchmark`, `convert_checkpoint` a `Checkpoint`. Nothing is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_apex.cli.errors import CommandError

_WHERE = {
    "compare": "commands.compare",
    "Comparison": "comparing.comparison",
    "find_ranges": "commands.ranges",
    "Ranges": "ranging.ranges",
    "diagnose": "commands.doctor",
    "Diagnosis": "doctoring.diagnosis",
    "run_benchmark": "commands.bench",
    "Benchmark": "benching.benchmark",
    "convert_checkpoint": "commands.convert",
    "inspect_checkpoint": "converting.inspection",
    "Checkpoint": "converting.inspection",
}
__all__ = ["CommandError", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lightning_apex.cli' has no attribute {name!r}")
    return getattr(import_module(f"lightning_apex.cli.{_WHERE[name]}"), name)
