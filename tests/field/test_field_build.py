"""What setup.py says of CUDA compilers that do not fit torch, without compiling anything."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup(monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    monkeypatch.chdir(ROOT)
    return SimpleNamespace(**runpy.run_path("setup.py"))


def torch_for(cuda):
    return SimpleNamespace(__version__="2.99", version=SimpleNamespace(cuda=cuda))


def nvcc(*version):
    return SimpleNamespace(version=version, path="/opt/cuda/bin/nvcc")


def test_another_minor_version_is_a_note_at_most(setup, capsys):
    setup.check_versions(torch_for("13.0"), nvcc(13, 0))
    assert capsys.readouterr() == ("", "")
    setup.check_versions(torch_for("13.0"), nvcc(13, 2))
    said = "".join(capsys.readouterr())
    assert "13.2" in said and "13.0" in said and "enough" in said


@pytest.mark.parametrize("version", [(12, 9), (14, 0)])
def test_another_major_version_ends_the_build_and_says_how_to_go_on(setup, version, capsys):
    with pytest.raises(SystemExit) as ended:
        setup.check_versions(torch_for("13.0"), nvcc(*version))
    said = f"{ended.value}{''.join(capsys.readouterr())}"
    assert "cannot build" in said and "/opt/cuda/bin/nvcc" in said
    assert "CUDA 13.0 toolkit in CUDA_HOME" in said and "LIGHTNING_APEX_CUDA=0" in said


@pytest.mark.parametrize(
    ("cuda", "asked", "said"),
    [
        (None, "1", "was built without CUDA"),
        ("13.0", "1", "no nvcc in CUDA_HOME"),
        ("13.0", "yes", "none of auto, 1 and"),
    ],
)
def test_cuda_that_cannot_be_had_is_never_a_quiet_cpu_build(setup, monkeypatch, capsys, cuda, asked, said):
    monkeypatch.setenv("LIGHTNING_APEX_CUDA", asked)
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    setup.choose_cuda.__globals__["Nvcc"].find = staticmethod(lambda: None)
    with pytest.raises(SystemExit) as ended:
        setup.choose_cuda(torch_for(cuda))
    assert said in f"{ended.value}{''.join(capsys.readouterr())}"
