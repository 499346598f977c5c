"""``lightning-apex convert`` with what it cannot use: one sentence, exit status 2, nothing written."""

from __future__ import annotations

import argparse
import os
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("jsonargparse")

from lightning_apex.cli import CommandError, convert_checkpoint, inspect_checkpoint
from lightning_apex.cli.converting import reading
from lightning_apex.cli.program import main


@pytest.fixture
def good(tmp_path: Path) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "good.pt")
    return tmp_path / "good.pt"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence."""
    folder = Path(words[0]).parent
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.is_file() and os.access(path, os.R_OK)}
    assert main(["convert", *words]) == 2
    after = {path: path.read_bytes() for path in folder.glob("**/*") if path.is_file() and os.access(path, os.R_OK)}
    assert before == after
    captured = capsys.readouterr()
    assert captured.out == ""
    [sentence] = [line for line in captured.err.splitlines() if line.startswith("lightning-apex: ")]
    return sentence


def damaged(path: Path, kind: str) -> None:
    torch.save({"w": torch.ones(1000)}, path)
    whole = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(whole[:2000])
    elif kind == "one byte":
        path.write_bytes(whole[:40] + bytes([whole[40] ^ 255]) + whole[41:])
    elif kind == "text":
        path.write_text("loss: 3\n")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "a zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a.txt", "hello")
    elif kind == "a picture":
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "a zip", "a picture"])
def test_a_file_that_is_no_checkpoint(kind, tmp_path, capsys):
    damaged(tmp_path / "bad.pt", kind)
    assert "is damaged or was not written by torch.save" in refused(capsys, str(tmp_path / "bad.pt"))


def test_no_file(tmp_path, capsys):
    assert "does not exist: give the path" in refused(capsys, str(tmp_path / "none.pt"))


def test_a_folder_that_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    assert "without .metadata" in refused(capsys, str(tmp_path / "inner"))


def test_a_sharded_folder_asks_for_unsafe_and_a_damaged_one_says_so(tmp_path, capsys):
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"nonsense")
    assert "add --unsafe" in refused(capsys, str(folder))
    assert "is damaged" in refused(capsys, str(folder), "--unsafe")


def test_python_objects_need_unsafe(tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1)}, tmp_path / "o.pt")
    assert "Python objects (argparse.Namespace)" in refused(capsys, str(tmp_path / "o.pt"))
    assert inspect_checkpoint(tmp_path / "o.pt", unsafe=True).weights[0].place == "model"


def test_objects_of_a_package_that_is_not_there(tmp_path, capsys, monkeypatch):
    import sys
    import types

    module = types.ModuleType("gone_package")
    module.Thing = type("Thing", (), {"__module__": "gone_package"})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gone_package", module)
        torch.save({"model": {"w": torch.ones(2)}, "x": module.Thing()}, tmp_path / "o.pt")
    assert "package 'gone_package', which is not installed" in refused(capsys, str(tmp_path / "o.pt"), "--unsafe")


@pytest.mark.parametrize("held", [{"epoch": 3}, [1, 2], torch.ones(3), {"a": torch.tensor(1.0)}])
def test_no_weights(held, tmp_path, capsys):
    torch.save(held, tmp_path / "n.pt")
    assert "no state dict of a module" in refused(capsys, str(tmp_path / "n.pt"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "O9"], "--to: 'O9' is none of"),
        (["--to", "O2"], "to writes a checkpoint: add --output"),
        (["--output", "{new}"], "not what to write"),
        (["--output", "{good}", "--to", "O2"], "is never overwritten"),
        (["--output", "{new}/x/y", "--to", "O2"], "lies in no folder"),
        (["--output", "{new}", "--state_dict_only"], "holds 2 state dicts: add --key with one of model, ema"),
        (["--output", "{new}", "--state_dict_only", "--key", "net"], "key='net' holds no weights: use one of 'model'"),
        (
            ["--output", "{new}", "--state_dict_only", "--key", "ema", "--strip_prefix", "x."],
            "strip_prefix='x.' begins no name",
        ),
        (["--output", "{new}", "--to", "O2", "--key", "ema"], "add --state_dict_only"),
        (["--output", "{new}", "--torch_optimizer"], "holds no optimizer's state"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_arguments(words, sentence, good, capsys):
    words = [word.format(new=good.with_name("new.pt"), good=good) for word in words]
    assert sentence in refused(capsys, str(good), *words)


def test_an_unknown_level_from_python(good):
    with pytest.raises(CommandError, match="to='O6' is no opt level"):
        convert_checkpoint(str(good), output=str(good.with_name("new.pt")), to="O6")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_full_disk_leaves_nothing(error, good, capsys, monkeypatch):
    def save(made, path):
        Path(path).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(torch, "save", save)
    assert "cannot be written" in refused(capsys, str(good), "--output", str(good.with_name("n")), "--to", "O2")


def test_a_name_taken_meanwhile_is_left_alone(good, capsys, monkeypatch):
    new = good.with_name("new.pt")
    save = torch.save

    def slow_save(made, path):
        save(made, path)
        new.write_text("somebody else's")

    monkeypatch.setattr(torch, "save", slow_save)
    assert main(["convert", str(good), "--output", str(new), "--to", "O2"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert new.read_text() == "somebody else's"
    assert {path.name for path in good.parent.iterdir()} == {"good.pt", "new.pt"}


def test_a_file_system_without_links(good, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(reading.os, "link", link)
    made = convert_checkpoint(str(good), output=str(good.with_name("new.pt")), to="O2")
    assert made.written is not None
    assert torch.load(made.written, weights_only=True)["model"]["w"].tolist() == [1.0, 1.0]
