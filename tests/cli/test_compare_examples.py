"""The examples of ``lightning-apex compare`` train, and their committed report is what the README says it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from lightning_apex.cli.comparing.child import Task, main
from lightning_apex.cli.comparing.records import read_events, run_of_events

EXAMPLES = Path(__file__).parents[2] / "examples" / "compare"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


def test_there_are_three() -> None:
    assert [config.stem for config in CONFIGS] == ["char_gpt", "dcgan", "digits_resnet"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_a_step_or_two_at_o5(config: Path, tmp_path: Path) -> None:
    task = Task(str(config), None, None, "cpu", "O5", seed=0, steps=2, half_dtype=None, probes_ranges=True)
    (tmp_path / "task").write_text(json.dumps(asdict(task)))
    assert main([str(tmp_path / "task"), str(tmp_path / "events")]) == 0
    run = run_of_events("O5", 0, read_events(tmp_path / "events"))
    assert run.finished and run.first_not_finite is None and run.losses
    assert run.memory is not None and 0 < run.memory.weights < run.memory.masters + run.memory.activations


def test_the_committed_report_is_small_and_whole() -> None:
    folder = EXAMPLES / "report"
    page, picture = folder / "report.html", folder / "report.png"
    assert page.stat().st_size + picture.stat().st_size < 600_000
    text = page.read_text()
    assert "examples/compare/digits_resnet.yaml" in text and text.rstrip().endswith("</html>")
    assert "src=" not in text and 'href="http' not in text
    assert picture.read_bytes().startswith(b"\x89PNG")
