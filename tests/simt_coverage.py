"""Which lines of csrc/cuda the tests of the emulated kernels execute, measured by gcov.

    python tests/simt_coverage.py

runs test_simt_shapes.py on a build that counts, and prints a table of the kernels and files, and every line that was
not executed. What only nvcc compiles (the other side of `#if defined(SIMT_EMU)`) is not counted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from simt import build

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "csrc" / "cuda"
ROWS = ["tests/test_simt_shapes.py", "-k", "64x1024-random", "-m", "not slow"]
Counts = dict[str, Counter[int]]  # by file: how often each line was executed


def run_rows(library: Path) -> str:
    """Runs the rows in a process whose end writes the counts."""
    for old in library.parent.glob("*.gcda"):
        old.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *ROWS],
        cwd=ROOT,
        env=os.environ | {"SIMT_LIBRARY": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def read_counts(folder: Path) -> Counts:
    """All lines of csrc/cuda that were compiled, over all instantiations of templates."""
    counts: Counts = defaultdict(Counter)
    for notes in sorted(folder.glob("*.gcno")):
        gcov = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(notes)], cwd=folder, capture_output=True, text=True, check=True
        )
        for file in json.loads(gcov.stdout)["files"]:
            path = Path(file["file"])
            if path.resolve().parent != CUDA:
                continue
            for line in file["lines"]:
                counts[path.name][line["line_number"]] += line["count"]
    return counts


def kernels_of(path: Path) -> dict[str, range]:
    """The lines of each kernel in a file."""
    lines, found = path.read_text().splitlines(), {}
    for first, line in enumerate(lines):
        if "__global__" not in line or line.lstrip().startswith(("//", "#")):
            continue
        name = re.search(r"(\w+_kernel)\(", "".join(lines[first : first + 3]))
        if name is not None:
            found[name[1]] = range(first + 1, lines.index("}", first) + 2)
    return found


def table(counts: Counts) -> list[tuple[str, str, int, int]]:
    """(file, kernel or what else there is, lines executed, lines)."""
    rows = []
    for name, lines in sorted(counts.items()):
        parts = kernels_of(CUDA / name)
        inside = {line for part in parts.values() for line in part}
        groups = {kernel: [line for line in lines if line in part] for kernel, part in parts.items()}
        groups["device functions, launches"] = [line for line in lines if line not in inside]
        for group, members in groups.items():
            rows.append((name, group, sum(lines[line] > 0 for line in members), len(members)))
    return rows


def missed(counts: Counts) -> list[tuple[str, str]]:
    """(file, text) of every line that was not executed."""
    text = {name: (CUDA / name).read_text().splitlines() for name in counts}
    return [(n, text[n][line - 1].strip()) for n in sorted(counts) for line in sorted(counts[n]) if not counts[n][line]]


def measure() -> Counts:
    """Builds, runs and counts."""
    library = build.build(build.VARIANTS["coverage"])
    run_rows(library)
    return read_counts(library.parent)


def report(counts: Counts) -> str:
    rows = [f"{name:24} {part:28} {done:4} of {all:4}" for name, part, done, all in table(counts)]
    return "\n".join([*rows, *(f"not executed: {name}: {line}" for name, line in missed(counts))])


if __name__ == "__main__":
    print(report(measure()))
