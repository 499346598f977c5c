"""The program's frame: commands made of functions, exit statuses, and what goes to which stream."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")

from lightning_apex import cli
from lightning_apex.cli import program
from lightning_apex.cli.errors import CommandError, one_sentence

ROOT = Path(__file__).parents[2]


@dataclass
class Answer:
    arguments: dict[str, Any]
    exit_code: int = 0

    def as_json(self) -> Any:
        return self.arguments | {"nan": math.nan}

    def show(self, console: Any) -> None:
        console.print(f"shown {sorted(self.arguments)}")


def work(
    what: Literal["a", "b"],
    names: Sequence[Literal["x", "y", "z"]] = ("x",),
    steps: int = 3,
    out: str | None = None,
    start_over: bool = False,
) -> Answer:
    """Does the work.

    At length.

    Args:
        what: The thing.
        names: Some letters.
        steps: How many of them.
        out: A folder.
        start_over: From the beginning.
    """
    return Answer({"what": what, "names": list(names), "steps": steps, "out": out, "start_over": start_over})


class Fake:
    summary = "does the work"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def load(self) -> Callable[..., Any]:
        return self.function


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    table = {"work": Fake(work)}
    monkeypatch.setattr(program, "COMMANDS", table)
    return table


Captured = pytest.CaptureFixture[str]


def test_arguments_come_from_the_signature(commands: Any, capsys: Captured) -> None:
    words = ["work", "b", "--names", "y", "z", "--steps", "7", "--start-over", "--out", "here", "--json"]
    assert program.main(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "what": "b", "names": ["y", "z"], "steps": 7, "out": "here", "start_over": True, "nan": None
    }  # fmt: skip
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"names": ["x"], "steps": 3, "start_over": False}),
        (["--names=[z,y]"], {"names": ["z", "y"]}),
        (["--names", "z"], {"names": ["z"]}),
        (["--start_over", "true"], {"start_over": True}),
        (["--start_over=false"], {"start_over": False}),
        (["--start-over=true"], {"start_over": True}),
        (["--out=a=b"], {"out": "a=b"}),
        (["--names", "z", "--out", "here"], {"names": ["z"], "out": "here"}),
        (["--start_over", "--steps=5"], {"start_over": True, "steps": 5}),
    ],
)
def test_spellings(words: list[str], expected: dict[str, Any], commands: Any) -> None:
    options = program.parse("work", work, ["a", *words])
    assert {key: list(options[key]) if key == "names" else options[key] for key in expected} == expected


def test_without_json_the_result_shows_itself(commands: Any, capsys: Captured) -> None:
    assert program.main(["work", "a"]) == 0
    assert "shown ['names', 'out'," in capsys.readouterr().out


def test_what_a_model_prints_is_no_json(commands: Any, capsys: Captured) -> None:
    def talks() -> Answer:
        print("hello")
        return Answer({"a": 1})

    commands["work"] = Fake(talks)
    assert program.main(["work", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1, "nan": None} and printed.err == "hello\n"


def test_help_after_a_list_is_help(commands: Any, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="0"):
        program.main(["work", "a", "--names", "x", "-h"])
    assert "Does the work." in capsys.readouterr().out


def test_help_has_the_docstrings_words(commands: Any, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="0"):
        program.main(["work", "--help"])
    out = capsys.readouterr().out
    for expected in ("Does the work.", "How many of them.", "default: 3", "--json", "lightning-apex work"):
        assert expected in out


def test_help_shows_lists_and_switches_as_they_are_read(commands: Any, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="0"):
        program.main(["work", "--help"])
    out = capsys.readouterr().out
    assert "[--names ITEM [ITEM ...]]" in out and "[--start_over [{true,false}]]" in out
    assert "--names+" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["work", "a", "--steps", "x"], "--steps: expected int, got 'x'"),
        (["work", "c"], "--what: 'c' is none of 'a', 'b'"),
        (["work"], "what"),
        (["work", "a", "--bogus", "1"], "--bogus"),
        (["work", "a", "--names", "q"], "names"),
        (["play"], "command 'play' is unknown: use one of work"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_words_are_one_sentence_and_status_2(words: list[str], said: str, commands: Any, capsys: Captured) -> None:
    assert program.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("lightning-apex: ")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (CommandError("no such thing: make one."), 2, "lightning-apex: no such thing: make one."),
        (KeyboardInterrupt(), 130, "lightning-apex: interrupted."),
        (ImportError("lightning_apex's compiled extension has not been built; run `x`."), 2, "run `x`."),
    ],
)
def test_statuses(error: BaseException, status: int, said: str, commands: Any, capsys: Captured) -> None:
    def fails() -> None:
        raise error

    commands["work"] = Fake(fails)
    assert program.main(["work"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_a_finding_is_status_1(commands: Any) -> None:
    def finds() -> Answer:
        return Answer({}, exit_code=1)

    commands["work"] = Fake(finds)
    assert program.main(["work"]) == 1


def test_an_error_of_ours_is_not_swallowed(commands: Any) -> None:
    def breaks() -> None:
        raise ZeroDivisionError

    commands["work"] = Fake(breaks)
    with pytest.raises(ZeroDivisionError):
        program.main(["work"])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, commands: Any, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert program.main(["work", "a"]) == 2
    assert "rich is missing: run `pip install 'lightning-apex[cli]'`" in capsys.readouterr().err


@pytest.mark.parametrize("name", program.COMMANDS)
def test_every_argument_of_every_command_has_its_words(name: str, capsys: Captured) -> None:
    function = program.COMMANDS[name].load()
    for argument in function.__annotations__.keys() - {"return"}:
        assert f"\n        {argument}: " in (function.__doc__ or ""), argument
    with pytest.raises(SystemExit, match="0"):
        program.main([name, "--help"])
    assert "--json" in capsys.readouterr().out


def test_every_public_name_is_there() -> None:
    for name in cli.__all__:
        assert getattr(cli, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = cli.nothing


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_help_imports_no_torch_and_the_package_loads_when_asked() -> None:
    code = """
import contextlib, io, sys
import lightning_apex_program
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    lightning_apex_program.main()
assert "compare" in out.getvalue(), out.getvalue()
assert "torch" not in sys.modules
import lightning_apex
assert lightning_apex.cli.__name__ == "lightning_apex.cli"
assert "torch" not in sys.modules
from lightning_apex import LossScaler
assert LossScaler.__module__ == "lightning_apex.scaler" and lightning_apex.__version__
"""
    done = run(code, "--help")
    assert done.returncode == 0, done.stderr


def test_a_commands_help_imports_no_torch() -> None:
    code = """
import contextlib, sys
import lightning_apex_program
with contextlib.suppress(SystemExit):
    lightning_apex_program.main()
assert "torch" not in sys.modules
"""
    done = run(code, "compare", "--help")
    assert done.returncode == 0, done.stderr
    assert "--half_dtype" in done.stdout


def test_without_the_extension_the_program_starts_and_a_name_of_the_package_says_so() -> None:
    code = """
import sys
sys.modules["lightning_apex._C"] = None
import lightning_apex_program
package = lightning_apex_program.defer_package()
from lightning_apex import cli
from lightning_apex.cli import program
for _ in range(2):
    try:
        package.LossScaler
    except ImportError as error:
        assert "compiled extension" in str(error) and "pip install" in str(error), error
    else:
        raise AssertionError
class Uses:
    summary = ""
    def load(self):
        def use():
            from lightning_apex import LossScaler
        return use
program.COMMANDS["use"] = Uses()
sys.exit(program.main(["use"]))
"""
    done = run(code)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("lightning-apex: lightning_apex's compiled extension"), done.stderr
    assert done.stderr.count("\n") == 1


def test_any_module_may_be_the_first_that_the_program_imports() -> None:
    code = """
import importlib, os, sys
import jsonargparse, lightning.pytorch
import lightning_apex_program
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        lightning_apex_program.defer_package()
        importlib.import_module(f"lightning_apex.{name}")
        import lightning_apex
        assert lightning_apex.amp.initialize and lightning_apex.optimizers.FusedAdam and lightning_apex.ApexPrecision
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    names = "_extension amp cli.converting.changes clipping engine fabric fp16_utils masters optimizers.adam parallel"
    done = run(code, *names.split(), "plugins", "scaler", "sharding", "step")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "sentence"), [("a\n  b\n\nc", "a b"), ("x" * 500, "x" * 397 + "..."), (ValueError("v"), "v"), ("", "")]
)
def test_one_sentence(text: object, sentence: str) -> None:
    assert one_sentence(text) == sentence
