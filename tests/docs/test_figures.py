"""Figures in README and on the pages are those of benchmarks/results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown_blocks import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import page as figures


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.name)
def test_the_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert text == figures.filled(text), "run `python -m benchmarks.page`"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(*rows: tuple[str, str, float]) -> None:
        listed = [{"row": r, "against": a, "value": {"median": v}, "unit": "x"} for r, a, v in rows]
        (tmp_path / "made.json").write_text(json.dumps({"results": listed}))

    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.record.cache_clear()
    yield write
    figures.record.cache_clear()


def test_one_figure_is_replaced_and_its_comments_stay(results: Any) -> None:
    results(("AdamW", "× torch", 3.456), ("SGD", "× torch", 0.9))
    old = "a <!-- figure: made | AdamW | × torch -->1.0<!-- / --> b <!-- figure: made | SGD | × torch -->?<!-- / -->"
    new = figures.filled(old)
    assert new == old.replace("1.0", "3.5").replace("?", "0.90")
    assert figures.filled(new) == new


def test_a_table_has_a_column_for_each_contender_and_gaps_where_there_is_no_figure(results: Any) -> None:
    results(("AdamW", "× torch", 2.0), ("AdamW", "of roofline at 28 B", 0.951), ("Lion", "× timm", 12.7))
    assert figures.pivoted(figures.record("made")["results"]).splitlines() == [
        "| | × torch | of the roofline | × timm |",
        "| --- | --- | --- | --- |",
        "| AdamW | 2.0 | 0.95 | |",
        "| Lion | | | 13 |",
    ]


def test_a_figure_that_is_not_there_is_an_error(results: Any) -> None:
    results(("AdamW", "× torch", 2.0))
    with pytest.raises(KeyError, match=r"made.json has no row 'AdamW' against '× timm'"):
        figures.filled("<!-- figure: made | AdamW | × timm -->1<!-- / -->")
