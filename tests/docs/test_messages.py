"""The messages that docs/troubleshooting.md explains are those of the sources, and all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_blocks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "…"
_QUOTED = re.compile(r"^- (`+)(.+)\1 (.+)$", re.MULTILINE)
# The program and the rewriter of imports have messages for their own users, one sentence each.
_ELSEWHERE = ("cli", "migrate")
# Not for people: protocol of Python's import and attribute lookup.
_PROTOCOL = re.compile(rf"module '[\w.]+' has no attribute {GAP}")


@cache
def quoted() -> list[tuple[str, str]]:
    """What the page quotes, and the kind it says the message is of."""
    return [(found[2].strip(), found[3]) for found in _QUOTED.finditer(PAGE.read_text())]


def text_of(node: ast.AST) -> str:
    """A string as the source has it, with a gap for each value that is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


def raised(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Messages of errors and warnings, with their lines."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = ast.unparse(call.func)
        if isinstance(node, ast.Raise) or name.endswith(("warn", "rank_zero_info")):
            message = text_of(call.args[0])
            if len(message.replace(GAP, "")) > 15:  # what is computed elsewhere is found where it is written
                yield node.lineno, message


@cache
def sources() -> set[str]:
    """All strings of the package; of C++ those of one check together."""
    found = set()
    for path in (ROOT / "lightning_apex").rglob("*.py"):
        found |= {text_of(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr)}
    for path in (ROOT / "csrc").rglob("*.cpp"):
        for check in re.finditer(r"TORCH_CHECK\w*\((.*?)\);\n", path.read_text(), re.DOTALL):
            parts = re.findall(r'"((?:[^"\\]|\\.)*)"', check[1])
            found.add(GAP + GAP.join(parts).replace('\\"', '"') + GAP)
    return found


def fits(quote: str, message: str) -> bool:
    """Whether a quote's pieces are in a message in their order."""
    place = 0
    for piece in filter(None, quote.split(GAP)):
        place = message.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


OURS = [quote for quote, kind in quoted() if not kind.endswith("'s")]
OTHERS = [(quote, kind) for quote, kind in quoted() if kind.endswith("'s")]
WHERE = {
    "Lightning's": "lightning/pytorch/trainer/connectors/accelerator_connector.py",
    "jsonargparse's": "jsonargparse/_util.py",
}


def test_the_page_quotes_messages() -> None:
    assert len(OURS) > 100


@pytest.mark.parametrize("quote", OURS, ids=lambda quote: quote[:40])
def test_a_quoted_message_is_in_the_sources(quote: str) -> None:
    assert any(fits(quote, message) for message in sources())


@pytest.mark.parametrize(("quote", "kind"), OTHERS, ids=lambda text: text[:40])
def test_a_quoted_message_of_another_package_is_in_its_sources(quote: str, kind: str) -> None:
    path = WHERE[kind.rpartition(", ")[2]]
    spec = find_spec(path.partition("/")[0])
    if spec is None or spec.origin is None:
        pytest.skip(f"{path} is not installed")
    messages = [text_of(node) for node in ast.walk(ast.parse((Path(spec.origin).parents[1] / path).read_text()))]
    assert any(fits(quote, message) for message in messages)


def test_every_message_of_the_sources_is_quoted() -> None:
    missing = []
    for path in sorted((ROOT / "lightning_apex").rglob("*.py")):
        if path.relative_to(ROOT / "lightning_apex").parts[0] in _ELSEWHERE:
            continue
        for line, message in raised(ast.parse(path.read_text())):
            if not _PROTOCOL.fullmatch(message) and not any(fits(quote, message) for quote in OURS):
                missing.append(f"{path.relative_to(ROOT)}:{line}: {message}")
    assert not missing, "\n".join(["explain these in docs/troubleshooting.md:", *missing])
