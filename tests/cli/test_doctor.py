"""``lightning-apex doctor`` on this machine, with kernels that are wrong, and without an extension."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("jsonargparse")

import lightning_apex
from lightning_apex import ops
from lightning_apex.cli import CommandError, Diagnosis, diagnose
from lightning_apex.cli.doctoring import facts, formulas, groups, kernels, operators, speed
from lightning_apex.cli.program import main

ROOT = Path(lightning_apex.__file__).parent.parent
CPU = torch.device("cpu")


def test_a_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--checks", "packages", "extension", "kernels", "speed", "--seconds", "0.2", "--json"])
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert "kernels" in captured.err and code == (data["status"] == "bad")
    # A GPU beside an extension without CUDA kernels is bad.
    assert {finding["check"] for finding in data["findings"] if finding["status"] == "bad"} <= {"cuda"}
    seen = {(finding["check"], finding["status"]) for finding in data["findings"]}
    assert {("torch", "ok"), ("kernels", "ok"), ("speed", "ok")} <= seen
    assert len([f for f in data["findings"] if f["check"] == "kernels"]) >= len(ops.build_info()["cpu_backends"])
    rates = data["rates"]["cpu"]
    assert set(rates) == set(speed.OPS) and all(rate[dtype] > 0 for rate in rates.values() for dtype in ("float32",))
    assert data["extension"]["torch_version"] == ops.build_info()["torch_version"]


def test_what_people_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--checks", "packages", "extension"]) in (0, 1)
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and ops.cpu_backend() in printed


@pytest.mark.parametrize(("words", "said"), [
    (["--checks", "luck"], "luck"),
    (["--seconds", "0"], "seconds=0"),
    (["--seconds", "soon"], "soon"),
])  # fmt: skip
def test_bad_input_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    with pytest.raises(CommandError, match="give some of packages"):
        diagnose(checks=())


# ---- kernels ----


def test_every_operator_and_every_optimizer_is_run() -> None:
    registered = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("lightning_apex::")
    }
    checks = kernels.all_checks()
    assert {check.op for check in checks} == registered
    steps = {check.detail for check in checks if check.op == "fused_step_"}
    assert steps == {row["name"] for row in ops.optimizer_table()}


@pytest.mark.parametrize("name", sorted(operators.OPERATORS))
def test_a_wrong_operator_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check, against a kernel whose results are a little off."""
    check = kernels.Check(name, operators.OPERATORS[name])
    assert kernels.run(check, "cpu", CPU, None).right
    right = getattr(ops, name)

    def wrong(*args: Any) -> Any:
        result = right(*args)
        written = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]
        chosen = [t for t in (result if isinstance(result, tuple) else [result]) if isinstance(t, torch.Tensor)]
        for tensor in chosen if not name.endswith("_") else written:
            if tensor.is_floating_point():
                tensor.mul_(1.001)
        return result

    monkeypatch.setattr(ops, name, wrong)
    result = kernels.run(check, "cpu", CPU, None)
    assert not result.right and result.failure is None


@pytest.mark.parametrize("row", ops.optimizer_table(), ids=lambda row: row["name"])
def test_a_wrong_optimizer_is_found(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [check for check in kernels.all_checks() if check.detail == row["name"]]
    assert len(checks) == (2 if row["n_norms"] else 1)
    right = ops.fused_step_

    def wrong(name: str, params: list[torch.Tensor], *rest: Any, **kwargs: Any) -> None:
        right(name, params, *rest, **kwargs)
        params[1][3] += 1e-3

    monkeypatch.setattr(ops, "fused_step_", wrong)
    assert not any(kernels.run(check, "cpu", CPU, None).right for check in checks)


@pytest.mark.parametrize("row", ops.optimizer_table(), ids=lambda row: row["name"])
def test_the_formulas_agree_with_the_portable_float64_kernels(row: dict[str, Any]) -> None:
    """Two witnesses; an optimizer without a formula has the second alone."""
    case = formulas.StepCase.random(row, operators.SHAPES)
    for own, reference in zip(case._own_kernel(), case.reference(), strict=True):
        torch.testing.assert_close(own.double(), reference.double(), rtol=1e-10, atol=1e-12)


def test_an_optimizer_without_a_formula_is_compared_with_its_float64_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(formulas.FORMULAS, "adam")
    (check,) = (check for check in kernels.all_checks() if check.detail == "adam")
    before = ops.cpu_backend()
    assert kernels.run(check, "cpu", CPU, None).right and ops.cpu_backend() == before


def test_a_kernel_that_raises_is_a_result() -> None:
    def raising(device: torch.device) -> float:
        raise RuntimeError("no kernel image\nis available")

    result = kernels.run(kernels.Check("x", raising), "cpu", CPU, None)
    assert result.failure == "RuntimeError: no kernel image is available" and not result.right


def test_checks_leave_random_numbers_and_backend_alone() -> None:
    state, backend = torch.get_rng_state(), ops.cpu_backend()
    for place in kernels.places(tuple(ops.build_info()["cpu_backends"])):
        kernels.run(kernels.all_checks()[0], *place)
    assert torch.equal(torch.get_rng_state(), state) and ops.cpu_backend() == backend


# ---- processes ----


@pytest.mark.distributed
def test_two_processes_sum_a_tensor() -> None:
    result = groups.sum_in_processes("gloo", 2)
    assert result.failure is None and result.seconds is not None


@pytest.mark.distributed
def test_processes_that_cannot_meet_are_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    program = groups._PROGRAM.replace("import sys\n", "import sys\nsys.exit('no network here')\n", 1)
    monkeypatch.setattr(groups, "_PROGRAM", program)
    assert groups.sum_in_processes("gloo", 2).failure == "no network here"
    monkeypatch.setattr(groups, "_PROGRAM", "import time; time.sleep(60)")
    assert groups.sum_in_processes("gloo", 2, timeout=0.5).failure == "no answer within 0.5 s"


# ---- without an extension ----

# An editable installation would find the extension that is missing here.
START = """
import sys, runpy
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.argv = ["lightning-apex", *sys.argv[1:]]
"""
FAKE = """
import importlib.util
class Fake:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "lightning_apex._C" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.build_info = lambda: {"torch_version": "1.13.0", "cuda_version": None}
sys.meta_path.insert(0, Fake())
"""
RUN = "runpy.run_module('lightning_apex_program', run_name='__main__')"


def without_extension(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    ignored = shutil.ignore_patterns("_C.*.so", "_C.*.pyd", "__pycache__")
    shutil.copytree(ROOT / "lightning_apex", folder / "lightning_apex", ignore=ignored)
    shutil.copy(ROOT / "lightning_apex_program.py", folder)
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder,
    )


def test_a_missing_extension_is_a_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    words = ("doctor", "--json", "--seconds", "0.1", "--checks", "packages", "extension", "kernels", "speed")
    result = without_extension(tmp_path, START + RUN, *words)
    assert result.returncode == 1, result.stderr
    found = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert found["extension"]["status"] == "bad" and "has not been built" in found["extension"]["seen"]
    assert found["extension"]["mend"].startswith("pip install --no-build-isolation")
    assert found["kernels"]["status"] == "bad" and found["torch"]["status"] == "ok"
    assert "cpu" in found["speed"]["seen"]


def test_an_extension_for_another_torch_is_a_finding(tmp_path: Path) -> None:
    result = without_extension(tmp_path, START + FAKE + RUN, "doctor", "--checks", "extension")
    assert result.returncode == 1, result.stderr
    printed = " ".join(result.stdout.split())
    assert "was built for torch 1.13.0" in printed and "→ pip install --no-build-isolation" in printed


def test_sources_that_are_younger_than_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lightning_apex"
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    package.mkdir()
    (tmp_path / "setup.py").touch()
    source, built = tmp_path / "csrc" / "cpu" / "ops.cpp", package / "_C.cpython-311.so"
    source.touch()
    built.touch()
    monkeypatch.setattr(facts, "_PACKAGE", package)
    os.utime(source, (1000, 1000))
    assert facts._newer_source() is None
    os.utime(source, (9e9, 9e9))
    assert facts._newer_source() == os.path.join("csrc", "cpu", "ops.cpp")
    assert facts.rebuild_command() == f"pip install --no-build-isolation -e {tmp_path}"
    (tmp_path / "setup.py").unlink()
    assert facts._newer_source() is None and "--force-reinstall" in facts.rebuild_command()


def test_an_empty_diagnosis_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    Diagnosis().show(Console())
    assert "All is well" in capsys.readouterr().out
