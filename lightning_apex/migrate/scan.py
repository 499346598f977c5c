"""Finds the Apex names that a source file imports and uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from lightning_apex.migrate import names
from lightning_apex.migrate.row import Row
from lightning_apex.migrate.table import ARGUMENTS, TRAINER_ARGUMENTS

Action = Literal["write", "none", "hand"]

#: A file without these words holds nothing for us.
WORDS = re.compile(rb"apex|amp_C|syncbn|fused_layer_norm_cuda|amp_backend|amp_level|MixedPrecisionPlugin|AMPType")
_ROOTS = ("apex", "amp_C", "apex_C", "syncbn", "fused_layer_norm_cuda")
_LOOKUPS = ("import_module", "find_spec", "__import__", "module_available", "package_available", "RequirementCache")
_TRAINERS = ("Trainer", "from_argparse_args", "dict")
_UNKNOWN = Row("", "gone", None, "a name that Apex documents", "This one was internal to it, or unknown.")


@dataclass(frozen=True, order=True)
class Finding:
    """One place that names Apex.

    Attributes:
        line: From 1.
        column: From 1.
        name: The dotted name, as Apex knows it.
        verdict: See `Row`.
        now: What to write now.
        note: What differs, or why it is gone.
        action: ``"write"``: ``--write`` rewrites this import. ``"none"``: right as it is, once imports are rewritten.
            ``"hand"``: to be changed by hand.
    """

    line: int
    column: int
    name: str
    verdict: str
    now: str
    note: str
    action: Action


def is_apex(name: str) -> bool:
    """Whether a dotted name belongs to Apex or one of its compiled parts."""
    return name.partition(".")[0] in _ROOTS


def concerns_us(name: str) -> bool:
    """Whether a dotted name is Apex's, or was in Lightning because of Apex."""
    if is_apex(name):
        return True
    row = names.find(name) if name.startswith(("pytorch_lightning.", "lightning.pytorch.")) else None
    return row is not None


def still_apex(name: str) -> str | None:
    """Where a name of ``lightning_apex`` was rewritten from ``apex`` and is not here: its name in Apex."""
    if not name.startswith("lightning_apex."):
        return None
    row = names.find(name.removeprefix("lightning_"))
    if row is None or (row.to or "").startswith("lightning_apex"):
        return None
    return name.removeprefix("lightning_")


def dotted(node: cst.BaseExpression | None) -> str:
    """The source of a chain of names; empty if it is anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr.value}" if head else ""
    return ""


def imported(node: cst.ImportFrom) -> list[tuple[str, cst.ImportAlias]] | None:
    """The dotted names of ``from module import ...``; ``None`` for a relative import or a star."""
    if node.relative or isinstance(node.names, cst.ImportStar):
        return None
    module = dotted(node.module)
    return [(f"{module}.{dotted(alias.name)}", alias) for alias in node.names]


def plain_target(name: str) -> str | None:
    """What ``import name`` becomes: every module of ours is there once the package is imported."""
    to = names.target(name)
    return to if to is not None and to.partition(".")[0] == "lightning_apex" else None


def plain_imports_stay(module: cst.Module) -> bool:
    """Whether some ``import apex.x`` cannot be rewritten: then ``apex`` must go on naming Apex in this file."""

    class Visitor(cst.CSTVisitor):
        stay = False

        def visit_Import(self, node: cst.Import) -> None:
            for alias in node.names:
                name = dotted(alias.name)
                if is_apex(name) and name.startswith("apex") and alias.asname is None:
                    self.stay |= plain_target(name) is None and name.partition(".")[0] == "apex"

    visitor = Visitor()
    module.visit(visitor)
    return visitor.stay


def scan(module: cst.Module) -> list[Finding]:
    """All places in a parsed file that name Apex, in the order of their lines."""
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    scanner = _Scanner(plain_imports_stay(module))
    wrapper.visit(scanner)
    return sorted(set(scanner.findings))


class _Scanner(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, plain_imports_stay: bool) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self._plain_imports_stay = plain_imports_stay

    def _add(self, node: cst.CSTNode, name: str, row: Row, action: Action, now: str | None = None) -> None:
        start = self.get_metadata(PositionProvider, node).start
        now = row.now if now is None else now
        self.findings.append(Finding(start.line, start.column + 1, name, row.verdict, now, row.note, action))

    # --- imports ------------------------------------------------------------------------------------------------

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            name = dotted(alias.name)
            if not is_apex(name):
                continue
            row, to = names.find(name) or _UNKNOWN, plain_target(name)
            if to is None:
                self._add(alias, name, row, "hand")
            elif alias.asname is None and self._plain_imports_stay:
                kept = "this name by hand: another import here still binds `apex` to Apex"
                self._add(alias, name, row, "hand", kept)
            else:
                self._add(alias, name, row, "write", f"`{to}`")
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = dotted(node.module)
        if isinstance(node.names, cst.ImportStar) and not node.relative and is_apex(module):
            row, to = names.find(module) or _UNKNOWN, plain_target(module)
            self._add(node, f"{module}.*", row, "hand" if to is None or to == "lightning_apex" else "write")
        for name, alias in imported(node) or ():
            if concerns_us(name):
                to = names.target(name)
                self._add(alias, name, names.find(name) or _UNKNOWN, "hand" if to is None else "write")
            elif (old := still_apex(name)) is not None:
                self._add(alias, old, names.find(old) or _UNKNOWN, "hand")
        return False

    # --- uses ---------------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return not self._use(node)

    def visit_Name(self, node: cst.Name) -> None:
        self._use(node)

    def _use(self, node: cst.Name | cst.Attribute) -> bool:
        """Notes a use; True if the parts of the node need no visit."""
        text = dotted(node)
        for name in self._names_of(node):
            if (old := still_apex(name)) is not None:
                self._add(node, old, names.find(old) or _UNKNOWN, "hand")
                return True
            if not concerns_us(name):
                continue
            if name in _ROOTS:  # handed about as a whole: `sys.modules[apex]`
                return True
            rest = text.partition(".")[2]
            bound = name.removesuffix("." + rest) if rest else name  # what the first name in the text stands for
            self._add(node, name, names.find(name) or _UNKNOWN, _action(name, bound, self._plain_imports_stay))
            return True
        return False

    def _names_of(self, node: cst.CSTNode) -> Iterator[str]:
        for qualified in self.get_metadata(QualifiedNameProvider, node, set()) or ():
            if qualified.source is QualifiedNameSource.IMPORT:
                yield qualified.name

    # --- calls --------------------------------------------------------------------------------------------------

    def visit_Call(self, node: cst.Call) -> None:
        callee = dotted(node.func)
        self._check_arguments(node, callee)
        if callee.rpartition(".")[2] in _LOOKUPS and node.args:
            text = node.args[0].value
            value = text.evaluated_value if isinstance(text, cst.SimpleString) else None
            if isinstance(value, str) and is_apex(re.split(r"[^\w.]", value)[0]):
                row = names.find(value) or _UNKNOWN
                self._add(text, value, row, "hand", f'"{row.to or "lightning_apex"}"')

    def _check_arguments(self, node: cst.Call, callee: str) -> None:
        keywords = [(arg, arg.keyword.value) for arg in node.args if arg.keyword is not None]
        level = next((_text(arg.value) for arg, keyword in keywords if keyword == "amp_level"), None) or "O2"
        for arg, keyword in keywords:
            if keyword in TRAINER_ARGUMENTS and callee.rpartition(".")[2] in _TRAINERS:
                now = TRAINER_ARGUMENTS[keyword].format(level=level)
                row = Row(keyword, "gone", None, now, "Lightning 2.0 removed it.")
                self._add(arg, f"Trainer({keyword}=)", row, "hand")
            for name in self._names_of(node.func):
                apex = names.canonical(name.removeprefix("lightning_"))
                if now := ARGUMENTS.get(apex, {}).get(keyword, ""):
                    self._add(arg, f"{apex}({keyword}=)", Row(apex, "gone", None, now), "hand")


def _text(node: cst.BaseExpression) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def _action(name: str, bound: str, plain_imports_stay: bool) -> Action:
    """Whether a use is right once its import is rewritten."""
    now, import_now = names.target(name), names.target(bound)
    if bound == "apex" and plain_imports_stay:
        import_now = None
    if now is None or import_now is None:
        return "hand"
    return "none" if import_now + name.removeprefix(bound) == now else "hand"


__all__: Sequence[str] = ["Finding", "scan"]
