"""Rewrites the imports of Apex in a source file, and leaves every other byte alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar, cast

import libcst as cst

from lightning_apex.migrate import names
from lightning_apex.migrate.scan import concerns_us, dotted, imported, is_apex, plain_imports_stay, plain_target

_FOR_CHECKERS = re.compile(r"#\s*(noqa|type:|pylint|pyright|isort|mypy)")
_Line = TypeVar("_Line", cst.SimpleStatementLine, cst.SimpleStatementSuite)


def rewrite(module: cst.Module) -> cst.Module:
    """The file with every import rewritten that something takes the place of as it stands."""
    return module.visit(_Rewriter(plain_imports_stay(module)))


class _Rewriter(cst.CSTTransformer):
    def __init__(self, plain_imports_stay: bool) -> None:
        super().__init__()
        self._plain_imports_stay = plain_imports_stay

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        if len(updated_node.body) != 1:
            return self._in_one_line(updated_node)
        statement = updated_node.body[0]
        parts = self._replacements(statement)
        if len(parts) == 1:
            return updated_node if parts[0] is statement else updated_node.with_changes(body=parts)
        lines = [cst.SimpleStatementLine([part]) for part in parts]
        # What stood before the statement and after it stays there; words for a checker are for every part.
        end = updated_node.trailing_whitespace
        if end.comment is not None and _FOR_CHECKERS.match(end.comment.value):
            lines = [line.with_changes(trailing_whitespace=end) for line in lines]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=end)
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        return self._in_one_line(updated_node)

    def _in_one_line(self, node: _Line) -> _Line:
        body: list[cst.BaseSmallStatement] = []
        for statement in node.body:
            parts = self._replacements(statement)
            body += [part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for part in parts[:-1]]
            body.append(parts[-1])
        changed = any(a is not b for a, b in zip(body, node.body, strict=False)) or len(body) != len(node.body)
        return node.with_changes(body=body) if changed else node

    def _replacements(self, statement: cst.BaseSmallStatement) -> list[cst.BaseSmallStatement]:
        if isinstance(statement, cst.Import):
            return [self._plain(statement)]
        if isinstance(statement, cst.ImportFrom):
            return _from(statement)
        return [statement]

    def _plain(self, statement: cst.Import) -> cst.Import:
        aliases: list[cst.ImportAlias] = []
        changed = False
        for alias in statement.names:
            name = dotted(alias.name)
            to = plain_target(name) if is_apex(name) else None
            if to is None or (alias.asname is None and self._plain_imports_stay):
                aliases.append(alias)
                continue
            changed = True
            if alias.asname is None:  # `import apex.amp` binds apex
                alias = alias.with_changes(name=_name("lightning_apex"), asname=_as("apex"))
            else:
                alias = alias.with_changes(name=_name(to))
            if not any(_same(alias, other) for other in aliases):
                aliases.append(alias)
        return statement.with_changes(names=_closed(aliases)) if changed else statement


def _from(statement: cst.ImportFrom) -> list[cst.BaseSmallStatement]:
    """``from m import a, b``, a statement a module that its names are in now."""
    if isinstance(statement.names, cst.ImportStar):
        to = plain_target(dotted(statement.module)) if not statement.relative else None
        if to is None or to == "lightning_apex" or not is_apex(dotted(statement.module)):
            return [statement]
        return [statement.with_changes(module=_name(to))]
    groups: dict[str | None, list[cst.ImportAlias]] = {}
    for name, alias in imported(statement) or ():
        to = names.target(name) if concerns_us(name) else None
        if to is None:
            groups.setdefault(None, []).append(alias)
            continue
        module, _, last = to.rpartition(".")
        if last != dotted(alias.name):
            bound = alias.asname or _as(dotted(alias.name))
            alias = alias.with_changes(name=cst.Name(last), asname=None if _bound(bound) == last else bound)
        groups.setdefault(module, []).append(alias)
    if not set(groups) - {None}:
        return [statement]
    end = statement.names[-1]
    return [
        _with_names(statement, aliases, end).with_changes(module=statement.module if module is None else _name(module))
        for module, aliases in groups.items()
    ]


def _with_names(statement: cst.ImportFrom, aliases: list[cst.ImportAlias], end: cst.ImportAlias) -> cst.ImportFrom:
    """The statement with some of its names; its parenthesis closes as it did after its last one, ``end``."""
    *first, last = aliases
    rpar = statement.rpar
    if rpar is None:
        return statement.with_changes(names=_closed(aliases))
    if last.comma is end.comma:
        return statement.with_changes(names=aliases)
    closing = end.comma.whitespace_after if isinstance(end.comma, cst.Comma) else rpar.whitespace_before
    if not isinstance(closing, cst.ParenthesizedWhitespace):
        return statement.with_changes(names=_closed(aliases))
    own = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else closing
    comment = own.first_line if isinstance(own, cst.ParenthesizedWhitespace) else cst.TrailingWhitespace()
    space = closing.with_changes(first_line=comment, empty_lines=[])
    last = last.with_changes(comma=cst.Comma(whitespace_after=space))
    return statement.with_changes(
        names=[*first, last], rpar=rpar.with_changes(whitespace_before=cst.SimpleWhitespace(""))
    )


def _closed(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """The aliases, without a comma after the last."""
    *first, last = aliases
    return [*first, last.with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def _name(dotted_name: str) -> cst.Name | cst.Attribute:
    return cast("cst.Name | cst.Attribute", cst.parse_expression(dotted_name))


def _as(name: str) -> cst.AsName:
    return cst.AsName(cst.Name(name))


def _bound(asname: cst.AsName) -> str:
    return dotted(cast(cst.BaseExpression, asname.name))


def _same(one: cst.ImportAlias, other: cst.ImportAlias) -> bool:
    bound = [_bound(alias.asname) if alias.asname is not None else "" for alias in (one, other)]
    return dotted(one.name) == dotted(other.name) and bound[0] == bound[1]
