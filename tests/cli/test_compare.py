"""``lightning-apex compare``: its processes, what it keeps for later, and what it says of bad input."""

from __future__ import annotations

import _thread
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from compare_support import HERE, MODELS, Children, compared

from lightning_apex.cli import Comparison
from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.program import main

without_report = pytest.mark.usefixtures("no_report")


def test_all_levels_and_seeds_and_o0_is_always_there(children: Children, tmp_path: Path) -> None:
    comparison = compared(tmp_path / "out", levels=("O5", "O2"))
    assert children.take_calls() == [f"{level}-seed{seed}" for seed in (0, 1) for level in ("O0", "O5", "O2")]
    assert [(run.level, run.seed) for run in comparison.runs] == [(v, s) for v in ("O0", "O5", "O2") for s in (0, 1)]
    assert comparison.recommendation.level == "O5" and comparison.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html", "report.json", "report.png", "runs"
    ]  # fmt: skip


@without_report
def test_a_level_that_is_killed_or_fails_is_a_finding_and_the_others_go_on(children: Children, tmp_path: Path) -> None:
    children.set(O1_seed0="killed", O2_seed1="fails", O4_seed0="dies early")
    comparison = compared(tmp_path / "out", levels=("O1", "O2", "O4", "O5"))
    assert len(children.take_calls()) == 10
    said = "\n".join(comparison.findings)
    assert (
        "O1 (seed 0) did not finish after 2 steps: its process was ended by SIGKILL, as the system does when memory "
        "runs out." in said
    )
    assert "O2 (seed 1) did not finish after 2 steps: ValueError: no." in said
    assert "O4 (seed 0) did not finish after 0 steps: its process ended with status 1: ImportError: something" in said
    assert comparison.recommendation.level == "O5" and comparison.exit_code == 1
    assert not list((tmp_path / "out" / "runs").glob(".*"))


@without_report
def test_finished_runs_are_kept_and_the_others_done_again(children: Children, tmp_path: Path) -> None:
    children.set(O2_seed0="killed")
    first = compared(tmp_path / "out")
    children.take_calls()
    children.set()
    second = compared(tmp_path / "out")
    assert children.take_calls() == ["O2-seed0"]
    assert second.runs[0] == first.runs[0] and second.exit_code == 0
    compared(tmp_path / "out", levels=("O0", "O2", "O5"), seeds=3)
    assert children.take_calls() == ["O5-seed0", "O5-seed1", "O0-seed2", "O2-seed2", "O5-seed2"]
    compared(tmp_path / "out", fresh=True)
    assert len(children.take_calls()) == 4


@without_report
def test_an_interrupted_comparison_ends_its_child_and_resumes(children: Children, tmp_path: Path) -> None:
    children.set(O2_seed0="hangs")

    def interrupt() -> None:
        while children.pid is None:
            time.sleep(0.02)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "out")
    assert children.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(children.pid, 0)
    assert not (tmp_path / "out" / "report.html").exists()
    children.take_calls()
    children.set()
    assert compared(tmp_path / "out").exit_code == 0
    assert children.take_calls() == ["O2-seed0", "O0-seed1", "O2-seed1"]


@without_report
def test_two_comparisons_do_not_share_a_folder(children: Children, tmp_path: Path) -> None:
    compared(tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    with (tmp_path / "out" / "runs" / "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match=r"out='.*out' is in use by another comparison: wait for it"):
            compared(tmp_path / "out", fresh=True)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before
    compared(tmp_path / "out")


@without_report
def test_other_settings_need_another_folder(children: Children, tmp_path: Path) -> None:
    compared(tmp_path / "out")
    with pytest.raises(
        CommandError, match=r"out='.*' holds runs with steps=4 \(now 5\): give another folder, or --fresh"
    ):
        compared(tmp_path / "out", steps=5)
    assert compared(tmp_path / "out", steps=5, fresh=True).settings["steps"] == 5


@without_report
def test_settings_without_a_finished_run_bind_nobody(children: Children, tmp_path: Path) -> None:
    compared(tmp_path / "out", seeds=1)
    for path in (tmp_path / "out" / "runs").glob("*.jsonl"):
        path.unlink()
    assert compared(tmp_path / "out", seeds=1, steps=5).settings["steps"] == 5


@without_report
@pytest.mark.parametrize("change", ["config", "model", "version"])
def test_changed_files_and_versions_are_other_settings(
    change: str, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = tmp_path / "mine.py", tmp_path / "c.yaml"
    model.write_text("class Mine: pass\n")
    config.write_text("model:\n  class_path: mine.Mine\n")
    words = {"config": str(config), "model": None, "data": None}
    compared(tmp_path / "out", **words)
    if change == "version":
        monkeypatch.setattr("lightning_apex.cli.comparing.settings.version", lambda name: "9.9")
    else:
        path = {"config": config, "model": model}[change]
        path.write_text(path.read_text() + "# more\n")
    said = {"config": "another config", "model": "another mine", "version": r"lightning [\d.]+ \(now 9.9\)"}[change]
    with pytest.raises(CommandError, match=said):
        compared(tmp_path / "out", **words)


@pytest.mark.parametrize("happens", ["bad", "dies early"])
def test_input_that_no_level_can_use_leaves_nothing_behind(happens: str, children: Children, tmp_path: Path) -> None:
    children.set(O0_seed0=happens, O2_seed0=happens)
    with pytest.raises(CommandError) as caught:
        compared(tmp_path / "out", seeds=1)
    if happens == "bad":
        assert str(caught.value) == "the model is no good: mend it."
        assert children.take_calls() == ["O0-seed0"]
    else:
        assert str(caught.value).startswith(
            "no level could be trained: O0 killed (its process ended with status 1: Imp"
        )
    assert not (tmp_path / "out").exists()


@without_report
def test_what_one_level_cannot_use_after_others_could_is_a_finding(children: Children, tmp_path: Path) -> None:
    children.set(O2_seed0="bad", O0_seed1="bad")
    comparison = compared(tmp_path / "out")
    assert len(children.take_calls()) == 4
    assert "O2 (seed 0) did not finish after 0 steps: the model is no good: mend it." in comparison.findings
    assert comparison.exit_code == 1
    children.set()
    compared(tmp_path / "out")
    assert children.take_calls() == ["O2-seed0", "O0-seed1"]


def test_children_find_what_the_caller_finds(children: Children, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "somewhere"))
    compared(tmp_path / "out", levels=("O0",), seeds=1)
    assert str(tmp_path / "somewhere") in json.loads(Path(f"{children.plan}.task").read_text())["import_paths"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "steps=0: give at least 1."),
        (["--seeds", "-1"], "seeds=-1: give at least 1."),
        (["--levels", "O0", "O9"], "O9"),
        (["--config", "nowhere.yaml"], "config='nowhere.yaml' cannot be read"),
        (["--out", "a_file/x"], "out='a_file/x' cannot be written (Not a directory)"),
        (["--half_dtype", "int8"], "int8"),
        (["--config", "unknown.yaml"], "config key 'modle' is unknown: did you mean 'model'?"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    words: list[str], said: str, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    (tmp_path / "unknown.yaml").write_text("modle: {}\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["compare", "--model", f"{MODELS}:Net", "--data", f"{MODELS}:Data", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert children.take_calls() == []


def test_a_report_that_cannot_be_written_leaves_no_half_one(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        if (tmp_path / "out" / "report.json").exists():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CommandError, match=r"report\.png cannot be written: No space left on device"):
        compared(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.json", "runs"]


@pytest.mark.slow
def test_the_program_itself(tmp_path: Path) -> None:
    words = ["--model", f"{MODELS}:Killed", "--data", f"{MODELS}:Data", "--accelerator", "cpu", "--levels", "O5"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_apex_program", "compare", *words, "--steps=5", "--seeds=1", "--out=out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "O5 (seed 0) did not finish after 1 steps" in " ".join(done.stdout.split())
    assert "Use O0." in done.stdout
    run = Comparison.load(tmp_path / "out").runs[0]
    assert run.finished and run.out_of_range is not None and run.memory is not None
