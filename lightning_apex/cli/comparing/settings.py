"""What must be the same for two runs to be part of one comparison, and the file that remembers it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.output import json_text, write_whole
from lightning_apex.cli.sections import find_modules, read_config


@dataclass
class Settings:
    """What all runs of a comparison have in common.

    Attributes:
        config: Path of the config; likewise ``model``, ``data`` and ``accelerator`` as they were given.
        steps: Of each run.
        half_dtype: For the levels O1 to O3; ``None`` for the level's own.
        content: Digests of the config and of the source files that it names.
        versions: Of Python, torch, Lightning and this package.
    """

    config: str | None
    model: str | None
    data: str | None
    accelerator: str | None
    steps: int
    half_dtype: str | None
    content: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def complete(self) -> Settings:
        """Fills in what is read from files and packages."""
        sections = read_config(self.config, self.model, self.data)
        find_modules(self.config)
        files = {} if self.config is None else {"config": Path(self.config)}
        for name in [*_class_paths(sections), *_argument_modules(self.model, self.data)]:
            path = _source_of(name)
            if path is not None and path not in files.values():
                files[name] = path
        self.content = {name: _digest(path) for name, path in files.items()}
        self.versions = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
        self.versions.update({name: _version(name) for name in ("torch", "lightning", "lightning-apex")})
        return self

    def keep_in(self, folder: Path, fresh: bool) -> None:
        """Remembers the settings in a folder of runs.

        Raises:
            CommandError: If the folder holds runs with other settings and they are not to be done anew.
        """
        path = folder / "settings.json"
        before = _read(path)
        runs = any(folder.glob("*-seed*.jsonl"))
        if before is not None and before != asdict(self) and runs and not fresh:
            raise CommandError(
                f"out={str(folder.parent)!r} holds runs with {_difference(before, asdict(self))}: give another folder, "
                "or --fresh to discard them."
            )
        write_whole(path, json_text(self))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # not installed, only found
        return "unknown"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first setting that differs, as half a sentence."""
    for key, value in now.items():
        old = before.get(key)
        if old == value:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            changed = next(name for name in sorted({*value, *old}) if value.get(name) != old.get(name))
            if key == "content":
                return f"another {changed} (it has changed since)"
            return f"{changed} {old.get(changed)} (now {value.get(changed)})"
        return f"{key}={old!r} (now {value!r})"
    return "other settings"


def _class_paths(value: Any) -> Iterator[str]:
    """All ``class_path`` of a config, as modules."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "class_path" and isinstance(item, str):
                yield item.rpartition(".")[0]
            else:
                yield from _class_paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _class_paths(item)


def _argument_modules(*names: str | None) -> list[str]:
    return [name.partition(":")[0] for name in names if name]


def _source_of(module: str) -> Path | None:
    """A module's file, where it is nobody's installed package: those have versions, and do not change."""
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    try:
        # Not a submodule: that would import its package.
        spec = importlib.util.find_spec(module.partition(".")[0]) if module else None
    except (ImportError, ValueError):
        return None
    locations = [*(spec.submodule_search_locations or ())] if spec is not None else []
    origin = Path(locations[0], *module.split(".")[1:]).with_suffix(".py") if "." in module and locations else None
    found = origin if origin is not None else Path(spec.origin) if spec is not None and spec.origin else None
    return found if found is not None and found.is_file() and "site-packages" not in found.parts else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
