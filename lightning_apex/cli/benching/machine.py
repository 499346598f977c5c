"""Where something was measured."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lightning_apex


def machine() -> dict[str, Any]:
    """Date, processors and versions, for reports."""
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning_apex": lightning_apex.__version__,
        "build": {key: str(value) for key, value in lightning_apex.build_info().items()},
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
    return record


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
