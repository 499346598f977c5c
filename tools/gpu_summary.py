"""The end of gpu_check.sh: one table and one JSON file of what its steps left behind.

python tools/gpu_summary.py STEPS FOLDER BEGAN, a time in seconds: what is older is another run's.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BENCHMARKS = ("gpu", "gpu_batchnorm", "gpu_training")


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    there = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if there else None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "lightning": find_spec("lightning") is not None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def collect(steps: list[str], folder: Path, since: float) -> dict[str, Any]:
    """Joins the steps' outcomes with the ratios of those benchmarks that were written since a time."""
    record: dict[str, Any] = {"steps": [], "results": [], "notes": {}}
    for line in steps:
        name, status, seconds = line.rstrip("\n").split("\t")
        record["steps"].append({"name": name, "status": status, "seconds": int(seconds)})
    for name in BENCHMARKS:
        path = folder / f"{name}.json"
        if path.exists() and path.stat().st_mtime >= since:
            written = json.loads(path.read_text())
            record["results"] += written["results"]
            record["notes"] |= written.get("notes", {})
    return record


def show(record: dict[str, Any]) -> None:
    """Prints the steps, and the ratios that have a goal."""
    for step in record["steps"]:
        print(f"{step['name']:12s} {step['status']:14s} {step['seconds']:>4d} s")
    goals = [result for result in record["results"] if result["must"] is not None]
    if goals:
        print(f"\n{'ratio':52s} {'got':>7s} {'must':>6s}")
    for result in goals:
        title = f"{result['row']} {result['against']}"
        print(f"{title:52s} {result['value']['median']:>7.2f} {result['must']:>6.2f}  {result['verdict']}")


def main(argv: list[str]) -> int:
    """Returns 1 if a step failed."""
    table, folder, began = Path(argv[0]), Path(argv[1]), float(argv[2])
    record = {"machine": machine()} | collect(table.read_text().splitlines(), folder, began)
    show(record)
    path = folder / "gpu_check.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{path}")
    return int(any(step["status"].startswith(("failed", "out of time")) for step in record["steps"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
