"""The program: finds the command, makes its arguments from its function's signature, runs it and prints its result."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_apex.cli.errors import BAD_INPUT, INTERRUPTED, CommandError, one_sentence

PACKAGES = ("jsonargparse", "docstring_parser", "rich", "matplotlib")  # of the extra "cli"


@dataclass(frozen=True)
class Command:
    """Where a command's function is: imported only when the command is used, so that ``--help`` is quick."""

    module: str
    function: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """Imports the function."""
        function: Callable[..., Any] = getattr(
            import_module(f"lightning_apex.cli.commands.{self.module}"), self.function
        )
        return function


COMMANDS = {
    name: Command(name, function, summary)
    for name, function, summary in (
        ("doctor", "diagnose", "check versions, kernels, speed and process groups on this machine"),
        ("compare", "compare", "train your model at several opt levels and say which to use"),
        ("ranges", "find_ranges", "see what fp16 and bf16 would lose of your model, and which loss scale loses least"),
        ("bench", "run_benchmark", "time optimizers, batch norm or whole steps on your shapes"),
        ("convert", "convert_checkpoint", "show what a checkpoint holds, or write it for another level or for torch"),
    )
}
_DESCRIPTION = "Choose an opt level on evidence, know your machine, see where time goes."
_EPILOG = """\
lightning-apex COMMAND --help tells what a command takes. Every command takes --json: JSON alone on stdout.

exit status: 0 all is well; 1 something was found that a script should notice; 2 bad input; 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except CommandError as error:
        print(f"lightning-apex: {error}", file=sys.stderr)
        return BAD_INPUT
    except ImportError as error:
        if "compiled extension" not in str(error):
            raise
        print(f"lightning-apex: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("lightning-apex: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        _general_parser().parse_args(words or ["--help"])
    name, *rest = words
    command = COMMANDS.get(name)
    if command is None:
        raise CommandError(f"command {name!r} is unknown: use one of {', '.join(COMMANDS)}.")
    _require_packages()
    function = command.load()
    options = parse(name, function, rest)
    as_json = options.pop("json")
    if name != "doctor":
        _ = import_module("lightning_apex").__version__  # all of the package now: a part of it would import it again
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # a user's model may print
        result = function(**options)
    _print(result, as_json)
    return int(result.exit_code)


def _general_parser() -> argparse.ArgumentParser:
    parser = _SentenceParser(
        prog="lightning-apex",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-apex {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    return parser


class _SentenceParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise CommandError(f"{message.rstrip('.')}: see {self.prog} --help.")


def _version() -> str:
    try:
        return version("lightning-apex")
    except PackageNotFoundError:
        return "(not installed)"


def _require_packages() -> None:
    missing = []
    for name in PACKAGES:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            missing.append(name)
    if missing:
        raise CommandError(f"{', '.join(missing)} is missing: run `pip install 'lightning-apex[cli]'`.")


# --- a command's arguments ------------------------------------------------------------------------------------------


def parse(name: str, function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """The arguments of a command's function, and ``json``.

    Raises:
        CommandError: If the words do not fit the signature.
    """
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog=f"lightning-apex {name}",
        exit_on_error=False,
        description=inspect.cleandoc(function.__doc__ or "").split("\n\n")[0],
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone on stdout")
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    _show_as_read(parser, function)
    try:
        namespace = parser.parse_args(_spelled_out(function, words))
    except argparse.ArgumentError as error:
        raise CommandError(f"{_readable(error)}: see lightning-apex {name} --help.") from error
    return dict(namespace.as_dict())


def _spelled_out(function: Callable[..., Any], words: Sequence[str]) -> list[str]:
    """``--levels O0 O1`` as ``--levels ["O0","O1"]`` and ``--fresh`` as ``--fresh=true``, which jsonargparse knows."""
    kinds = typing.get_type_hints(function)
    result: list[str] = []
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        name = word[2:].replace("-", "_") if word.startswith("--") else ""
        kind = kinds.get(name)
        if kind is None:
            result.append(word + equals + value)
            continue
        if not equals and kind is bool and not (rest and rest[0] in ("true", "false")):
            equals, value = "=", "true"
        elif not equals and _is_list(kind) and rest and not rest[0].startswith("["):
            items = []
            while rest and not re.match(r"-\D", rest[0]):
                items.append(rest.pop(0))
            equals, value = "=", json.dumps(items)
        result.append(f"--{name}{equals}{value}")
    return result


def _show_as_read(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """In ``--help``, ``--levels ITEM [ITEM ...]`` and ``--fresh [{true,false}]``, as `_spelled_out` reads them."""
    kinds = typing.get_type_hints(function)
    for action in parser._actions:
        kind = kinds.get(action.dest)
        if kind is bool:
            action.metavar = "[{true,false}]"
        elif _is_list(kind):
            action.metavar = "ITEM [ITEM ...]"
            action.option_strings = [word for word in action.option_strings if not word.endswith("+")]


def _is_list(kind: Any) -> bool:
    origins = [typing.get_origin(part) or part for part in (kind, *typing.get_args(kind))]
    return any(isinstance(o, type) and issubclass(o, Sequence) and not issubclass(o, str | bytes) for o in origins)


def _readable(error: argparse.ArgumentError) -> str:
    """What jsonargparse says, in our words: ``--steps: expected int, got 'x'``."""
    key = re.search(r'^Parser key "([\w.]+)"', str(error))
    union = re.search(r"Subtypes: \[(.*)\]\s+Errors:.*Given value: (.*)$", str(error), re.DOTALL)
    if key and union:
        kinds = re.sub(r"(?:, )?<class 'NoneType'>", "", union[1])
        kinds = re.sub(r"typing\.Literal\[(.*?)\]|<class '([\w.]+)'>", r"\1\2", kinds)
        return f"--{key[1]}: {union[2]!r} is none of {kinds}"
    text = one_sentence(error)
    text = re.sub(r'^Parser key "([\w.]+)":', lambda found: f"--{found[1]}:", text)
    text = re.sub(r"Expected an? <class '([\w.]+)'>\. Got value: (.*)$", r"expected \1, got '\2'", text)
    text = re.sub(r"Expected an? (?:typing\.)?Literal\[(.*?)\]\. Got value: (.*)$", r"'\2' is none of \1", text)
    return text.rstrip(".")


def _print(result: Any, as_json: bool) -> None:
    from rich.console import Console

    from lightning_apex.cli.output import json_text

    if as_json:
        print(json_text(result.as_json()))
    else:
        result.show(Console())


if __name__ == "__main__":
    sys.exit(main())
