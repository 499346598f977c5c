"""Reads checkpoint files, without running code that they may hold, and writes them whole."""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_apex.cli.errors import CommandError, one_sentence


class ApexScaler:
    """Stands in for Apex's own objects in old checkpoints: plain attributes, no code."""


# Apex pickled these objects themselves.
_APEX_OBJECTS = [
    (ApexScaler, name)
    for name in (
        "apex.amp.scaler.LossScaler",
        "apex.fp16_utils.loss_scaler.LossScaler",
        "apex.fp16_utils.loss_scaler.DynamicLossScaler",
    )
]


def read(path: Path, unsafe: bool) -> Any:
    """The object that a checkpoint file, or a folder of torch.distributed.checkpoint, holds; tensors on the CPU.

    Args:
        path: The file or folder.
        unsafe: Whether code in it may run.

    Raises:
        CommandError: If it cannot be read.
    """
    if not path.exists():
        raise CommandError(f"checkpoint {str(path)!r} does not exist: give the path of a checkpoint file or folder.")
    if path.is_dir():
        return _read_folder(path, unsafe)
    return _read_file(path, unsafe, repr(str(path)))


def _read_file(path: Path, unsafe: bool, name: str) -> Any:
    foreign = f"checkpoint {name} is damaged or was not written by torch.save"
    # Files of torch before 1.6 cannot be mapped into memory.
    mapped = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(_APEX_OBJECTS):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=not unsafe, mmap=mapped)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"checkpoint {name} holds objects of the package {error.name!r}, which is not installed: install it, or "
            "write the checkpoint without them where it is."
        ) from error
    except pickle.UnpicklingError as error:
        objects = ", ".join(_objects(path))
        if unsafe or not (objects or "allowed global" in str(error)):
            raise CommandError(f"{foreign}.") from error
        raise CommandError(
            f"checkpoint {name} holds Python objects ({objects or 'of unknown classes'}), and reading those can run "
            "code: if you trust its source, add --unsafe."
        ) from error
    except OSError as error:
        raise CommandError(f"checkpoint {name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a damaged file can raise anything, KeyError and EOFError among it
        raise CommandError(f"{foreign}.") from error


def _objects(path: Path) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError):
        return []


def _read_folder(path: Path, unsafe: bool) -> Any:
    if not (path / ".metadata").is_file():
        raise CommandError(
            f"checkpoint {str(path)!r} is a folder without .metadata, so not one of torch.distributed.checkpoint: "
            "give a checkpoint file, or such a folder."
        )
    if not unsafe:
        raise CommandError(
            f"checkpoint {str(path)!r} is sharded, its index is a pickle, and reading that can run code: if you trust "
            "its source, add --unsafe."
        )
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    try:
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "whole"
            dcp_to_torch_save(path, whole)
            held = torch.load(whole, map_location="cpu", weights_only=False)
        # Lightning keeps what is not sharded beside it.
        if (path / "meta.pt").is_file():
            held = _read_file(path / "meta.pt", unsafe, repr(str(path / "meta.pt"))) | held
    except CommandError:
        raise
    except (CheckpointException, Exception) as error:  # the former is a BaseException
        raise CommandError(f"checkpoint {str(path)!r} is damaged, or files of it are missing.") from error
    return held


def free_path(output: str | Path) -> Path:
    """The path to write to, known to be free and in a folder that can be written.

    Raises:
        CommandError: If there is a file already, or no such folder.
    """
    path = Path(output)
    if path.exists() or path.is_symlink():
        raise CommandError(f"output={str(output)!r} exists, and is never overwritten: give another name.")
    if not path.parent.is_dir():
        raise CommandError(f"output={str(output)!r} lies in no folder that exists: make {str(path.parent)!r} first.")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"output={str(output)!r} cannot be written: {str(path.parent)!r} is not writable.")
    return path


def write_new(path: Path, save: Callable[[Path], None]) -> None:
    """Lets ``save`` write a temporary file beside ``path`` and gives it its name, which must still be free.

    Raises:
        CommandError: If it cannot be written; nothing is left then.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        save(temporary)
        mask = os.umask(0o022)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        _name(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where a disk is full
        raise CommandError(f"output={str(path)!r} cannot be written: {one_sentence(error, 160)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)  # fails where the name was taken meanwhile, as a rename would not
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(f"{path} was made by somebody else meanwhile") from None
        temporary.rename(path)
