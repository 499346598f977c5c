"""Shell lines of the pages: run where that is quick, else checked against what they name."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_blocks import ROOT
from packaging.requirements import Requirement

MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")
_SETTINGS = re.compile(r"^([A-Z_]+) \?=", re.MULTILINE)


def words_of(text: str) -> list[list[str]]:
    """The commands of a block, without comments, continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def check(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs or checks one command, in the environment that stands before it."""
    with monkeypatch.context() as for_this_line:
        while _ASSIGNMENT.match(words[0]):
            name, _, value = words[0].partition("=")
            for_this_line.setenv(name, value)
            words = words[1:]
        for start, checker in _CHECKERS.items():
            length = len(start.split())
            if words[:length] == start.split():
                return checker(words[length:], folder, for_this_line)
        if "/" in words[0]:
            return _named_file(words, folder, for_this_line)
    raise AssertionError(f"no check knows `{' '.join(words)}`: add one to tests/docs/shell_lines.py")


# --- checked, not run -----------------------------------------------------------------------------------------------


def _make(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"CXX", "MAX_JOBS", *_SETTINGS.findall(MAKEFILE)}
    for word in rest:
        if _ASSIGNMENT.match(word):
            assert word.partition("=")[0] in known, f"the Makefile has no setting {word}"
        else:
            assert re.search(rf"^{re.escape(word)}:.*## ", MAKEFILE, re.MULTILINE), f"the Makefile has no target {word}"


def _pip(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (word for word in rest if not word.startswith("-")):
        if found := re.fullmatch(r"\.(?:\[(.*)\])?", word):
            extras = found[1].split(",") if found[1] else []
        else:
            requirement = Requirement(word)
            extras = sorted(requirement.extras) if requirement.name == "lightning-apex" else []
        for extra in extras:
            assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE), f"pyproject.toml has no extra {extra}"


def _benchmark(name: str, *options: str) -> None:
    source = ROOT / (name.replace(".", "/") + ".py")
    assert source.is_file(), f"there is no {name}"
    text = source.read_text() + (ROOT / "benchmarks" / "common.py").read_text()
    assert [word for word in options if word.startswith("--") and f'"{word}"' not in text] == []


def _module(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if rest[0].startswith("benchmarks."):
        _benchmark(*rest)
    else:
        assert find_spec(rest[0]) is not None, f"there is no {rest[0]}"


def _example(path: str, rest: list[str]) -> None:
    """Examples have tests of their own, which run them."""
    text = "".join(file.read_text() for file in (ROOT / path).parent.glob("*.py"))
    assert (ROOT / path).is_file(), f"there is no {path}"
    assert [word for word in rest if word.startswith("--") and f'"{word}"' not in text] == []


def _torchrun(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(rest)
    places = (folder, ROOT)
    assert any((place / given.training_script).is_file() for place in places), f"no {given.training_script}"


def _named_file(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / rest[0]).exists(), f"there is no {rest[0]}"


def _program(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_apex.cli.program import COMMANDS, parse

    name, *options = rest
    if name not in ("--help", "--version") and "--help" not in options:
        parse(name, COMMANDS[name].load(), options)


def _nothing(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes a shell, nothing to check."""


# --- run, in this process, since importing torch takes longer than any of them --------------------------------------


def _migrate(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = folder / "path" / "to" / "project"
    project.mkdir(parents=True, exist_ok=True)
    (project / "old.py").write_text("from apex import amp\n")
    assert _run_module("lightning_apex.migrate", rest, monkeypatch) in (0, 1)


def _python(rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *arguments = rest
    if first == "-c":
        exec(compile(arguments[0], "<python -c>", "exec"), {})
    elif (folder / first).is_file():
        monkeypatch.setattr(sys, "argv", [first, *arguments])
        assert _status_of(lambda: runpy.run_path(first, run_name="__main__")) == 0, f"python {' '.join(rest)} failed"
    else:
        _example(first, arguments)


def _run_module(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return _status_of(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _status_of(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


_CHECKERS: dict[str, Callable[[list[str], Path, pytest.MonkeyPatch], None]] = {
    "make": _make,
    "pip install": _pip,
    "python -m benchmarks.page": _nothing,  # tests/docs/test_figures.py
    "python -m lightning_apex.migrate.page": _nothing,  # tests/migrate/test_table.py
    "python -m lightning_apex.migrate": _migrate,
    "python -m": _module,
    "python": _python,
    "torchrun": _torchrun,
    "bash": _named_file,
    "lightning-apex": _program,
    ".": _nothing,
    "cd": _nothing,
}
