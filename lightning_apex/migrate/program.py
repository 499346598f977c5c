"""The program: reads sources, says what became of Apex in them, and rewrites imports if asked to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_apex.migrate import files
from lightning_apex.migrate.row import WORDS, Verdict

_EPILOG = """\
Each line of output: file:line:column: name (verdict): what to write now. Those that begin with `hand` wait for you;
`write` is done by --write; the rest is right once the imports are.

exit status: 0 nothing is left to do; 1 something is, by --write or by hand, or a file could not be read; 2 bad usage
"""
_LABELS = {"write": "write", "hand": "hand ", "none": "ok   "}


@dataclass
class FileReport:
    """What was found in one file.

    Attributes:
        path: As it was reached from the command line.
        findings: All places.
        diff: What ``--write`` changes, or has changed.
        before: What the file held.
        after: The same with its imports rewritten.
        written: Whether it has.
        error: Why nothing was done with the file.
    """

    path: Path
    findings: list[Any] = field(default_factory=list)
    diff: str = ""
    before: bytes = b""
    after: bytes = b""
    written: bool = False
    error: str = ""

    @property
    def left_to_do(self) -> int:
        """Findings that still need somebody."""
        return sum(f.action == "hand" or (f.action == "write" and not self.written) for f in self.findings)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = _parse(argv)
    try:
        import libcst  # noqa: F401
    except ImportError:
        print("lightning_apex.migrate needs libcst: run `pip install libcst`.", file=sys.stderr)
        return 2
    reports = []
    for root in options.paths:
        for path in files.sources(root):
            report = examine(path)
            if not (report.findings or report.error):
                continue
            reports.append(report)
            if not options.json:
                _print(report)
            if options.write and report.diff:
                write(report)
                if not options.json:
                    print(f"{path}: {report.error or 'its imports are rewritten'}\n")
    if options.json:
        print(json.dumps([_as_json(report) for report in reports], indent=2))
    else:
        print(_summary(reports, options.write))
    return int(any(report.error or report.left_to_do for report in reports))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_apex.migrate",
        description="Says what became of the Apex names in Python sources.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a Python file, or a folder of them")
    parser.add_argument("--write", action="store_true", help="show a diff of the imports, then rewrite them")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of files with their findings")
    options = parser.parse_args(argv)
    for path in options.paths:
        if not path.exists():
            parser.error(f"{path} does not exist: give a Python file or a folder")
        if path.suffix == ".ipynb":
            parser.error(f"{path} is a notebook: export it first, `jupyter nbconvert --to script {path}`")
    return options


def write(report: FileReport) -> None:
    """Puts a file with rewritten imports in the place of the one that was examined."""
    try:
        files.replace(report.path, report.before, report.after)
        report.written = True
    except OSError as error:
        report.error = f"left alone, it cannot be written: {error}"


def examine(path: Path) -> FileReport:
    """Reads one file; one that cannot be read or parsed is left alone."""
    import libcst as cst

    from lightning_apex.migrate.rewrite import rewrite
    from lightning_apex.migrate.scan import WORDS as INTERESTING
    from lightning_apex.migrate.scan import scan

    report = FileReport(path)
    try:
        report.before = path.read_bytes()
        if not INTERESTING.search(report.before):
            return report
        module = cst.parse_module(report.before)
        report.findings = scan(module)
        new = rewrite(module)
        report.after = new.bytes
        report.diff = files.diff(path, report.before, report.after, new.encoding)
    except cst.ParserSyntaxError as error:
        report.error = f"left alone, it is not valid Python: {error.message} (line {error.raw_line})"
    except (OSError, SyntaxError, UnicodeError, RecursionError) as error:
        report.error = f"left alone, it cannot be read: {error}"
    return report


def _print(report: FileReport) -> None:
    if report.error:
        print(f"{report.path}: {report.error}")
    for f in report.findings:
        verdict: Verdict = f.verdict
        note = f" {f.note}" if f.note else ""
        print(f"{_LABELS[f.action]} {report.path}:{f.line}:{f.column}: {f.name} ({WORDS[verdict]}): {f.now}.{note}")
    if report.diff:
        print(f"\n{report.diff}")


def _summary(reports: Sequence[FileReport], write: bool) -> str:
    findings = [(r, f) for r in reports for f in r.findings]
    unread = sum(bool(r.error) for r in reports)
    if not findings and not unread:
        return "Nothing of Apex was found."
    written = sum(f.action == "write" and r.written for r, f in findings)
    waiting = sum(f.action == "write" and not r.written for r, f in findings)
    hand = sum(f.action == "hand" for _, f in findings)
    parts = [f"{len(findings)} {_plural('place', len(findings))} in {len(reports)} {_plural('file', len(reports))}"]
    if written:
        parts.append(f"{written} {_plural('import', written)} rewritten")
    if waiting:
        parts.append(f"{waiting} {_plural('import', waiting)} {'not rewritten' if write else 'for --write'}")
    parts.append(f"{hand} by hand" if hand else "nothing by hand")
    if unread:
        parts.append(f"{unread} {_plural('file', unread)} left alone")
    return "; ".join(parts) + "."


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"


def _as_json(report: FileReport) -> dict[str, Any]:
    return {
        "file": str(report.path),
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "diff": report.diff,
        "written": report.written,
        "error": report.error or None,
    }
