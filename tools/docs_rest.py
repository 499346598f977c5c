"""Reads docstrings for the site: their reStructuredText (formulas, code blocks, tables) becomes Markdown."""

from __future__ import annotations

import re
from copy import copy
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe

_INDENTED = r"(?P<body>(?:\n*^(?P=indent)[ ]+\S.*$)+)"
_MATH = re.compile(r"^(?P<indent> *)\.\. math::[ ]*(?P<first>.*)$" + _INDENTED.replace(")+)", ")*)"), re.MULTILINE)
_CODE = re.compile(r"^(?P<indent> *)\.\. code-block:: (?P<language>\w+)$" + _INDENTED, re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]+)`")
_NAME = re.compile(r"(?<!`)`([\w.]+)`(?!`)")
_SHOWN = re.compile(r"^::: ([\w.]+)\n(?!    options:\n      show_root_heading: false)", re.MULTILINE)
_RULE = re.compile(r"=+(?: +=+)+")


class RestToMarkdown(griffe.Extension):
    """The griffe extension that mkdocs.yml names."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Reads ``__doc__ = Base.__doc__``: such a class has its base's docstring and constructor."""
        if "__doc__" in cls.members and cls.docstring is None:
            base = cls.resolved_bases[0]
            assert base.docstring is not None, f"{base.path} has no docstring for {cls.path} to take over"
            cls.docstring = griffe.Docstring(base.docstring.value, parser="google", parent=cls)
            if "__init__" not in cls.members and "__init__" in base.members:
                cls.set_member("__init__", copy(base.members["__init__"]))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites a docstring as soon as it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _linked(markdown(obj.docstring.value), obj.name)


def _linked(text: str, own_name: str) -> str:
    """Names in single backticks become links where the reference has them."""

    def link(found: re.Match[str]) -> str:
        name = found[1].rpartition(".")[2]
        known = _documented().get(name)
        return f"[{found[0]}][{known}]" if known and name != own_name else found[0]

    return _NAME.sub(link, text)


@cache
def _documented() -> dict[str, str]:
    """What the pages of the reference show, by its last name; the Trainer's plugin before Fabric's."""
    pages = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))
    shown = [name for page in pages for name in _SHOWN.findall(page.read_text())]
    return {name.rpartition(".")[2]: name for name in sorted(shown, key=lambda name: "fabric" not in name)}


def markdown(text: str) -> str:
    """The same text in Markdown, formulas in the delimiters of arithmatex."""
    text = _MATH.sub(_display, text)
    text = _CODE.sub(lambda m: _fenced(m["indent"], m["language"], m["body"]), text)
    text = _INLINE.sub(lambda m: rf"\({' '.join(m[1].split())}\)", text)
    return _tables(text)


def _display(found: re.Match[str]) -> str:
    formula = " ".join(f"{found['first']} {found['body']}".split())
    if "&" in formula or r"\\" in formula:
        formula = rf"\begin{{align*}}{formula}\end{{align*}}"
    return f"{found['indent']}\n{found['indent']}\\[{formula}\\]\n"


def _fenced(indent: str, language: str, body: str) -> str:
    lines = dedent(body).strip("\n").splitlines()
    return "\n".join(indent + line for line in (f"```{language}", *lines, "```"))


def _tables(text: str) -> str:
    """Simple tables: the columns are where the rules of equals signs say."""
    lines, out, rules, columns = text.splitlines(), [], 0, []
    for line in lines:
        if _RULE.fullmatch(line.strip()):
            rules = rules % 3 + 1
            columns = [m.span() for m in re.finditer("=+", line)]
            columns[-1] = (columns[-1][0], None)  # the last cell may be longer than its rule
            if rules == 2:
                out.append("|" + "---|" * len(columns))
        elif rules in (1, 2):
            out.append("| " + " | ".join(line[a:b].strip() for a, b in columns) + " |")
        else:
            out.append(line)
    return "\n".join(out)
