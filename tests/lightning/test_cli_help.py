"""The CLI's help shows every argument of the public classes, with its type, its default and the docstring's text."""

import inspect
import re

import pytest
from cli_model import Classifier
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy

import lightning_apex
from lightning_apex import optimizers

pytest.importorskip("jsonargparse")
docstring_parser = pytest.importorskip("docstring_parser")
pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended to run from within Python"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
]
WHERE = {
    "ApexPrecision": "trainer.plugins",
    "ApexSyncBatchNorm": "trainer.plugins",
    "ApexDDPStrategy": "trainer.strategy",
    "LossScaleMonitor": "trainer.callbacks",
    "ApexModelSummary": "trainer.callbacks",
    **dict.fromkeys(optimizers.__all__, "optimizer"),
}


def help_of(option, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        LightningCLI(Classifier, run=False, args=[option])
    assert caught.value.code in (0, None)
    return " ".join(capsys.readouterr().out.split())


def arguments_of(kind):
    signature = inspect.signature(kind.__init__)
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for name, p in signature.parameters.items() if name not in ("self", "params") and p.kind not in skipped]


@pytest.mark.parametrize("name", WHERE)
def test_every_argument_with_type_default_and_text(name, capsys, monkeypatch):
    kind, where = getattr(lightning_apex, name), WHERE[name]
    shown = help_of(f"--{where}.help=lightning_apex.{name}", capsys, monkeypatch)
    documented = {p.arg_name: p.description for p in docstring_parser.parse(inspect.getdoc(kind)).params}
    arguments = arguments_of(kind)
    assert arguments
    # Each entry is " --option VALUE text (type: ..., default: ...)"; a list's has " --option+ VALUE" before the text.
    entries = {}
    for entry in re.split(rf" --{re.escape(where)}\.", shown):
        option = entry.split()[0].rstrip("+")
        entries[option] = entries.get(option, "") + entry
    for argument in arguments:
        entry = entries[argument.name]
        assert " ".join(documented[argument.name].split()) in entry
        assert "(type: " in entry
        default = "null" if argument.default is None else argument.default
        assert f"default: {default}" in entry


def test_the_first_line_says_what_the_class_is(capsys, monkeypatch):
    shown = help_of("--trainer.plugins.help=lightning_apex.ApexPrecision", capsys, monkeypatch)
    assert 'Mixed-precision training at an opt level: ``Trainer(plugins=[ApexPrecision("O2")])``' in shown


def test_a_strategy_shows_ddps_arguments_too(capsys, monkeypatch):
    shown = help_of("--trainer.strategy.help=lightning_apex.ApexDDPStrategy", capsys, monkeypatch)
    for name in inspect.signature(DDPStrategy.__init__).parameters:
        if name not in ("self", "kwargs"):
            assert f"--trainer.strategy.{name}" in shown
    assert "--trainer.strategy.static_graph" in shown  # DistributedDataParallel's
