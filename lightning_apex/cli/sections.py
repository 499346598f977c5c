"""Reads a LightningCLI config's sections and the classes that it or the user names."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_apex.cli.errors import CommandError, one_sentence

SECTIONS = ("model", "data", "optimizer", "lr_scheduler", "trainer")
_IGNORED = ("seed_everything", "ckpt_path", "weights_only", "subcommand")  # of a run, not of what is trained
_SUBCOMMANDS = ("fit", "validate", "test", "predict")


# --- the file -------------------------------------------------------------------------------------------------------


def read_config(config: str | Path | None, model: str | None, data: str | None) -> dict[str, Any]:
    """The sections of a config; checks what can be checked without importing anybody's classes."""
    if config is None and model is None:
        raise CommandError("there is nothing to train: give --config config.yaml, or --model module:Class.")
    content = _read_yaml(Path(config)) if config is not None else {}
    if isinstance(content.get("fit"), Mapping):
        content = {**content["fit"], **{key: content[key] for key in content if key in SECTIONS}}
    sections = {key: value for key, value in content.items() if key not in (*_IGNORED, *_SUBCOMMANDS)}
    check_keys(sections, SECTIONS)
    if model is None and not has_class(sections.get("model")):
        raise CommandError(
            f"config={str(config)!r} does not say which model: add model.class_path, or give --model module:Class."
        )
    return sections


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandError(f"config={str(path)!r} cannot be read: {why}.") from error
    except yaml.YAMLError as error:
        raise CommandError(f"config={str(path)!r} is not YAML: {one_sentence(error)}.") from error
    if not isinstance(content, dict):
        raise CommandError(
            f"config={str(path)!r} holds no sections: write model:, data:, trainer: as LightningCLI does."
        )
    return content


def has_class(section: Any) -> bool:
    """Whether a section names its class."""
    return isinstance(section, str) or (isinstance(section, Mapping) and "class_path" in section)


def check_keys(given: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """Refuses the first key that is not known, with the one that was probably meant."""
    known = list(known)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix + close[0]!r}?" if close else f"use one of {', '.join(known)}."
            raise CommandError(f"config key {prefix + str(key)!r} is unknown: {hint}")


# --- classes --------------------------------------------------------------------------------------------------------


def find_modules(config: str | Path | None) -> None:
    """Modules are looked for where the user stands and beside the config, as ``python main.py`` would."""
    folders = [os.getcwd()] + ([str(Path(config).resolve().parent)] if config is not None else [])
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def class_named(argument: str, name: str | None) -> Any:
    """The class that an argument names as ``module:Class`` or ``file.py:Class``."""
    return None if name is None else _of_the_right_kind(argument, name, object_named(argument, name))


def object_named(argument: str, name: str) -> Any:
    """Whatever it names."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise CommandError(f"{argument}={name!r} names no class: write it as package.module:Class.")
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise CommandError(f"{argument}={name!r} cannot be imported: there is no file {module}.")
        sys.path.insert(0, str(path.resolve().parent))
        module = path.stem
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise CommandError(f"{argument}={name!r} cannot be imported: {said(error)}.") from error
    return found


def _of_the_right_kind(argument: str, name: str, found: Any) -> Any:
    from lightning.pytorch import LightningDataModule, LightningModule

    kind = LightningModule if argument == "model" else LightningDataModule
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise CommandError(f"{argument}={name!r} is no {kind.__name__}: give a class made from lightning.pytorch's.")
    return found


def said(error: BaseException) -> str:
    """An exception as half a sentence."""
    return f"{type(error).__name__}: {one_sentence(error).rstrip('.')}"


# --- what others say ------------------------------------------------------------------------------------------------


def about_cuda(error: BaseException) -> str | None:
    """One sentence on an error that a model for GPUs meets on a machine without one; ``None`` for other errors."""
    import torch

    words = ("CUDA", "NVIDIA", "gpu backend", "cuda.is_available")
    if torch.cuda.is_available() or not any(word in str(error) for word in words):
        return None
    return (
        f"the model needs CUDA and there is no GPU here ({said(error)}): run it where there is one, or make it follow "
        "self.device."
    )


def about_config(error: BaseException) -> str:
    """What jsonargparse says of a section, in one sentence that names the key.

    Its text is a list of all that a key may be and why it is none of them; the first reason is ours.
    """
    text = " ".join(str(error).split())
    found = re.search(r'Parser key "([\w.]+)"', text)
    key = found[1] if found else ""
    problem = re.search(r"Problem with given class_path '([^']*)': (.*?)(?: - Expected a <class|$)", text)
    if problem is not None:
        inner = re.match(r'Parser key "([\w.]+)": (.*)', problem[2])
        key, why = (f"{key}.init_args.{inner[1]}", inner[2]) if inner else (key, problem[2])
        return f"config key {key!r} ({problem[1]}) cannot be used: {_plain(why)}."
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text)
    if group is not None:
        return f"config key '{group[1]}.{group[2]}' is unknown: see what the class takes."
    value = re.search(r"Given value: (.*?)\.?$", text)
    kinds = dict.fromkeys(kind for kind in re.findall(r"Expected a <class '([\w.]+)'>", text) if kind != "NoneType")
    if found and value and kinds:
        return f"config key {key!r} is {value[1]!r}: expected {' or '.join(kinds)}."
    return f"the config cannot be used: {one_sentence(error).rstrip('.')}."


def _plain(text: str) -> str:
    text = re.sub(r"Expected an? <class '([\w.]+)'>\. Got value: (.*)$", r"expected \1, got '\2'", text)
    return text[:1].lower() + text[1:].rstrip(".")
