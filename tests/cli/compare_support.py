"""Comparisons whose children are fakes that need no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_apex.cli import Comparison, compare

HERE = Path(__file__).parent
MODELS = HERE / "compare_models.py"
WORDS: dict[str, Any] = {"model": f"{MODELS}:Net", "data": f"{MODELS}:Data", "accelerator": "cpu"}


class Children:
    """Fake runs: what happens in each, and which were started."""

    def __init__(self, folder: Path) -> None:
        self.plan = folder / "plan.json"
        self.set()

    def set(self, **what: str) -> None:
        self.plan.write_text(json.dumps({name.replace("_", "-"): happens for name, happens in what.items()}))

    def take_calls(self) -> list[str]:
        calls = Path(f"{self.plan}.calls")
        names = calls.read_text().split() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return names

    @property
    def pid(self) -> int | None:
        path = Path(f"{self.plan}.pid")
        return int(path.read_text() or 0) if path.exists() else None


def compared(out: Path, **words: Any) -> Comparison:
    return compare(**(WORDS | {"levels": ("O0", "O2"), "steps": 4, "seeds": 2, "out": str(out)} | words))
