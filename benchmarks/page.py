"""Writes figures from benchmarks/results/*.json into README and docs/*.md: ``python -m benchmarks.page [--check]``.

A page holds ``<!-- figure: FILE | ROW | AGAINST -->1.5<!-- / -->`` for one median, and for a table the comments
``<!-- figures: TABLE -->`` and ``<!-- /figures -->``, between which the table goes; `TABLES` has their names.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_ONE = re.compile(r"(<!-- figure: (.+?) \| (.+?) \| (.+?) -->)[^<]*(<!-- / -->)")
_MANY = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page's text with the figures that the results hold.

    Raises:
        KeyError: If it asks for a figure or a table that is not there.
    """
    text = _ONE.sub(lambda m: m[1] + number(median(m[2], m[3], m[4])) + m[5], text)
    return _MANY.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


@cache
def record(name: str) -> dict[str, Any]:
    """What benchmarks/results/NAME.json holds."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def median(name: str, row: str, against: str) -> float:
    """The median of one figure."""
    for result in record(name)["results"]:
        if (result["row"], result["against"]) == (row, against):
            return float(result["value"]["median"])
    raise KeyError(f"benchmarks/results/{name}.json has no row {row!r} against {against!r}")


def number(value: float) -> str:
    """What means something: 0.93, 1.19, 3.5, 13."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


# --- tables ---------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def whole(name: str) -> str:
    """Everything in a file: a line for each row, a column for each thing it is compared with, a table for each kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for result in record(name)["results"]:
        kinds.setdefault(_kind(result["row"]), []).append(result)
    return "\n".join(f"**{kind}**\n\n{pivoted(results)}" for kind, results in kinds.items())


def pivoted(results: list[dict[str, Any]]) -> str:
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        against = result["against"].split(" at ")[0].replace("of roofline", "of the roofline")
        cells.setdefault(result["row"], {})[against] = told(result)
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    return table(["", *columns], [[row, *(found.get(c, "") for c in columns)] for row, found in cells.items()])


def _kind(row: str) -> str:
    words = {"tail": "The whole tail of a step", "masters": "bf16 weights, fp32 masters", "states": "All in bf16"}
    if found := next((kind for word, kind in words.items() if word in row.split()), None):
        return found
    if not row.endswith((" ResNet-50", " GPT-2")):
        return "Special cases"
    return "fp32, where torch has it" if row.startswith(("AdamW", "SGD", "Adagrad")) else "fp32, where torch has none"


def told(result: dict[str, Any]) -> str:
    return number(result["value"]["median"]) + str(result["unit"]).removeprefix("x")


def plain(name: str) -> str:
    """Everything in a file, a line for each figure."""
    rows = [[r["row"], r["against"], told(r)] for r in record(name)["results"]]
    return table(["", "", "median"], rows)


def machine(name: str) -> str:
    """Where and when a file was measured."""
    m = record(name)["machine"]
    what = m.get("gpu") or f"{m['cores']} cores of {m['cpu'].replace('(R)', '')}, {m['threads']} threads"
    return f"\nMeasured on {what}, torch {m['torch'].partition('+')[0]}, {m['date'][:10]}.\n"


def fast() -> str:
    """README's choice."""
    name = "optimizers"
    rows, results = [], record(name)["results"]
    for title, row, others in (
        ("AdamW fp32, ResNet-50's 161 tensors", "AdamW fp32 ResNet-50", ("torch for-loop", "DeepSpeed")),
        ("AdamW fp32, GPT-2 small's 148 tensors", "AdamW fp32 GPT-2", ("torch for-loop", "DeepSpeed")),
        ("Lion, GPT-2", "Lion fp32 GPT-2", ("timm", "optimi")),
        ("LAMB, GPT-2", "LAMB fp32 GPT-2", ("timm", "pytorch_optimizer")),
        ("AdamW, 1000 tensors of 16 elements", "AdamW fp32 1000 x 16", ("torch for-loop",)),
        ("norm + unscale + clip + AdamW + zero_grad (O1), GPT-2", "O1 tail GPT-2", ("torch for-loop",)),
        ("the same at O5, GPT-2", "O5 tail GPT-2", ("torch composition",)),
    ):
        found = {r["against"].split(" at ")[0]: r["value"]["median"] for r in results if r["row"] == row}
        fused, roof = found.get("× torch fused"), found.get("of roofline")
        spoken = ", ".join(f"{_SPOKEN.get(o, o)} {number(found[f'× {o}'])}" for o in others)
        rows.append([title, number(roof) if roof else "", number(fused) if fused else "", spoken])
    return table(["", "of the roofline", "× torch fused", "× others"], rows) + machine(name)


_SPOKEN = {"torch for-loop": "torch's default", "torch composition": "the torch calls it takes"}


def levels() -> str:
    """What the levels gain in whole training steps."""
    rows = []
    for model in ("ResNet-18 224 NHWC", "transformer 20M"):
        figures = [number(median("step", model, f"{level} × torch fp32")) for level in ("O0", "O4", "O5")]
        rows.append([model.replace(" NHWC", " x 224, channels_last, batch 8"), *figures])
    return table(["× torch in fp32", "O0", "O4", "O5"], rows) + machine("step")


TABLES: dict[str, Callable[[], str]] = {
    "fast": fast,
    "levels": levels,
    "optimizers": lambda: whole("optimizers") + machine("optimizers"),
    "batchnorm": lambda: plain("batchnorm") + machine("batchnorm"),
    "step": lambda: plain("step") + machine("step"),
}


def main(arguments: list[str]) -> int:
    """Writes the pages; with ``--check`` only says which are old, with exit status 1."""
    old = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in old:
        if arguments == ["--check"]:
            print(f"{page.relative_to(ROOT)} has old figures: run `python -m benchmarks.page`.")
        else:
            page.write_text(filled(page.read_text()))
            print(page.relative_to(ROOT))
    return int(bool(old) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
