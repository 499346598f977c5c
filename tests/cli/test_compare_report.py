"""The report of ``lightning-apex compare``: the page, the picture, the table, JSON."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from compare_support import WORDS, Children, compared
from rich.console import Console

from lightning_apex.cli import Comparison
from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.program import main


class Links(HTMLParser):
    """All that a page would fetch, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_other_file_and_says_what_was_found(children: Children, tmp_path: Path) -> None:
    children.set(O4_seed0="killed")
    comparison = compared(tmp_path / "out", levels=("O2", "O4"))
    page = Links()
    page.feed((tmp_path / "out" / "report.html").read_text())
    assert all(link.startswith("#") for link in page.fetched)
    assert "script" not in page.tags and page.tags.count("svg") == 4
    for expected in ("Use O2", comparison.recommendation.reason, *comparison.findings, 'ApexPrecision("O2")', "torch "):
        assert expected in page.text
    assert re.search(r"lightning-apex compare --model \S+ --data \S+ --accelerator cpu --levels O0 O2 O4", page.text)


def test_skipped_steps_are_told_and_drawn(children: Children, tmp_path: Path) -> None:
    children.set(O2_seed0="skips")
    comparison = compared(tmp_path / "out", steps=8)
    assert comparison.findings[0] == (
        "O2 (seed 0) skipped 1 of 8 steps; the loss scale ended at 32768, and gradients were first not finite in "
        "net.0, the model itself (step 2)."
    )
    assert "1 step was skipped, while the loss scale was being found" in comparison.recommendation.reason
    text = (tmp_path / "out" / "report.html").read_text()
    assert text.count("<svg") == 5 and "a skipped step" in text
    again = Comparison.load(tmp_path / "out").runs[2]
    assert again.overflows == comparison.runs[2].overflows and math.isnan(again.losses["loss"][1])
    assert comparison.exit_code == 0


def test_runs_without_a_loss_recommend_nothing(children: Children, tmp_path: Path) -> None:
    children.set(O0_seed0="silent", O0_seed1="silent", O2_seed0="silent", O2_seed1="silent")
    comparison = compared(tmp_path / "out")
    assert comparison.recommendation.level is None and comparison.exit_code == 1
    assert "ApexPrecision(" not in (tmp_path / "out" / "report.html").read_text()
    assert Comparison.load(tmp_path / "out").recommendation == comparison.recommendation


@pytest.mark.usefixtures("no_report")
def test_text_of_others_is_escaped(children: Children, tmp_path: Path) -> None:
    comparison = compared(tmp_path / "out")
    comparison.runs[2].status, comparison.runs[2].error = "failed", "<script>alert(1)</script> & more"
    text = comparison.to_html(tmp_path / "page.html")
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert (tmp_path / "page.html").read_text() == text


def test_load_gives_what_was_saved(children: Children, tmp_path: Path) -> None:
    children.set(O4_seed0="killed", O5_seed1="fails")
    comparison = compared(tmp_path / "out", levels=("O2", "O4", "O5"))
    for path in (tmp_path / "out", tmp_path / "out" / "report.json", str(tmp_path / "out")):
        again = Comparison.load(path)
        assert again == comparison
        assert again.recommendation == comparison.recommendation and again.findings == comparison.findings
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["recommendation"]["level"] == "O2" and len(content["runs"]) == 8


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99, "settings": {}, "runs": []}', '{"format": 1}'])
def test_load_refuses_other_files(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(CommandError, match=r"report\.json is no report of lightning-apex compare"):
        Comparison.load(tmp_path)


def test_load_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        Comparison.load(tmp_path)


@pytest.mark.usefixtures("no_report")
def test_plot_draws_every_level(children: Children, tmp_path: Path) -> None:
    comparison = compared(tmp_path / "out")
    losses, distances, times, memory = comparison.plot().axes
    labels = [text.get_text() for text in losses.get_legend().get_texts()]
    assert labels == ["O0", "O2"] and len(losses.lines) == 8
    assert [text.get_text() for text in distances.get_legend().get_texts()] == ["O0 over seeds", "O2"]
    assert [bar.get_width() for bar in times.patches] == [1000.0, 500.0]
    assert sum(bar.get_width() for bar in memory.patches) == pytest.approx(2 * 450 / 2**20)


@pytest.mark.usefixtures("no_report")
def test_the_table_fits_80_columns(children: Children, tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    children.set(O5_seed0="killed")
    compared(tmp_path / "out", levels=("O1", "O2", "O3", "O4", "O5")).show(console)
    text = console.export_text()
    assert "…" not in text.split("Use ")[0]
    assert re.search(r"O2 .* 500 +0\.50 ", text) and "killed" in text


@pytest.mark.usefixtures("no_report")
def test_json_alone_on_stdout(children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", WORDS["model"], "--data", WORDS["data"], "--levels", "O2", "--steps", "3", "--seeds", "1"]
    assert main(["compare", *words, "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert content["recommendation"]["level"] == "O2" and [run["level"] for run in content["runs"]] == ["O0", "O2"]
    assert "O2, seed 0" in printed.err
