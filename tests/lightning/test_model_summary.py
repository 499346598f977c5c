"""ApexModelSummary: how many parameters in which dtype, masters included, and a size that is right."""

import io
import logging

import pytest
import torch
from helpers import LEVELS, Net, assert_same, batches, fit, plugin, trainer, weights
from torch import nn

from lightning_apex import ApexModelSummary

pytestmark = pytest.mark.filterwarnings("error:Precision .* is not supported by the model summary")


class Wide(Net):
    """net.0: 4800 weights, BatchNorm: 1200, net.3: 2404, and a parameter of the root: 6."""

    def __init__(self):
        super().__init__(width=600)
        self.scale = nn.Parameter(torch.ones(6))
        self.scale.requires_grad_(False)


def table_of(text):
    """The columns of the table by title, and the sums by name."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if any("┃" in line for line in lines):
        rows = [line.replace("┃", "│").strip("│").split("│") for line in lines if line.startswith(("┃", "│"))]
        sums = dict(line.split(": ") for line in lines if ": " in line)
    else:
        at = next(i for i, line in enumerate(lines) if "| Name" in line)
        until = next(i for i in range(at + 2, len(lines)) if lines[i].startswith("---"))
        rows = [line.split("|") for line in (lines[at], *lines[at + 2 : until])]
        sums = {line[10:].strip(): line[:10].strip() for line in lines[until + 1 :]}
    titles, *rows = [[cell.strip() for cell in row] for row in rows]
    return {title: [row[i] for row in rows] for i, title in enumerate(titles)}, {k: v.strip() for k, v in sums.items()}


@pytest.fixture
def summary(caplog, monkeypatch):
    """Fits a model and returns what the summary shows."""

    def run(level, model=None, rich=False, depth=-1, **kwargs):
        caplog.clear()
        screen = io.StringIO()
        if rich:
            console = pytest.importorskip("rich").get_console()
            monkeypatch.setattr(console, "file", screen)
            monkeypatch.setattr(console, "width", 150)
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.INFO)
        with caplog.at_level(logging.INFO):
            callbacks = [ApexModelSummary(depth, rich=rich)]
            fit(model or Wide(), level, batches(1), enable_model_summary=True, callbacks=callbacks, **kwargs)
        messages = [r.getMessage() for r in caplog.records]
        shown = screen.getvalue() if rich else "\n".join(m for m in messages if "| Name" in m or " params" in m)
        assert ("| Name" in "".join(messages)) is not rich
        return table_of(shown)

    return run


FLOAT32 = {"float32 params": "8.4 K"}
MIXED = {"bfloat16 params": "7.2 K", "float32 params": "1.2 K", "float32 master weights": "7.2 K"}
EXPECTED = {
    # dtypes of net, net.0, net.1, net.2, net.3; sums; bytes
    "O0": (["float32", "float32", "float32", "-", "float32"], FLOAT32, 8410 * 4),
    "O1": (["float32", "float32", "float32", "-", "float32"], FLOAT32, 8410 * 4),
    "O2": (["bfloat16, float32", "bfloat16", "float32", "-", "bfloat16"], MIXED, 7210 * (2 + 4) + 1200 * 4),
    "O3": (["bfloat16", "bfloat16", "bfloat16", "-", "bfloat16"], {"bfloat16 params": "8.4 K"}, 8410 * 2),
}
EXPECTED |= {"O4": EXPECTED["O1"], "O5": EXPECTED["O2"]}


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_sums_and_size(level, rich, summary):
    columns, sums = summary(level, rich=rich)
    dtypes, expected, size = EXPECTED[level]
    assert columns["Name"] == ["net", "net.0", "net.1", "net.2", "net.3"]
    assert columns["Dtype"] == dtypes
    assert {name: count for name, count in sums.items() if name.split()[0] in ("float32", "bfloat16")} == expected
    assert sums["Total estimated model params size (MB)"] == f"{size / 1e6:,.3f}"
    assert (sums["Total params"], sums["Trainable params"], sums["Non-trainable params"]) == ("8.4 K", "8.4 K", "6")


def test_the_size_is_that_of_the_memory(summary):
    """The parameters and masters of a run, counted by hand while it runs."""

    class Counting(Wide):
        def on_train_start(self):
            masters = self.trainer.precision_plugin.masters
            tensors = [*self.parameters(), *(masters.of(p) for p in masters if isinstance(p, nn.Parameter))]
            self.bytes = sum(t.nelement() * t.element_size() for t in tensors)

    model = Counting()
    _, sums = summary("O2", model)
    assert sums["Total estimated model params size (MB)"] == f"{model.bytes / 1e6:,.3f}"


def test_kept_modules_are_fp32(summary):
    columns, _ = summary(plugin("O2", keep_fp32=["net.0"]))
    assert columns["Dtype"][1:] == ["float32", "float32", "-", "bfloat16"]


def test_depth(summary):
    columns, _ = summary("O2", depth=1)
    assert (columns["Name"], columns["Dtype"]) == (["net", "other params"], ["bfloat16, float32", "bfloat16"])


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_sizes_of_an_example_input(level, summary):
    class Example(Wide):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.zeros(2, 8)

    model = Example()
    columns, _ = summary(level, model)
    assert model.example_input_array.dtype is torch.float32
    assert columns["Out sizes"][:2] == ["[2, 4]", "[2, 600]"]
    assert columns["Dtype"][1] == "bfloat16"


def test_a_shared_weight_is_counted_once(summary):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.again = self.net[3]

    _, sums = summary("O2", Tied())
    assert sums["Total estimated model params size (MB)"] == f"{((8 * 16 + 68) * 6 + 32 * 4) / 1e6:,.3f}"


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_without_our_plugin(precision, summary):
    columns, sums = summary(precision)
    dtype = "bfloat16" if precision == "bf16-true" else "float32"
    assert columns["Dtype"][0] == dtype
    assert sums["Total estimated model params size (MB)"] == f"{8410 * (2 if dtype == 'bfloat16' else 4) / 1e6:,.3f}"


def test_takes_the_place_of_the_trainers_own():
    made = trainer("O2", enable_model_summary=True, callbacks=[ApexModelSummary()])
    assert [type(c).__name__ for c in made.callbacks if "Summary" in type(c).__name__] == ["ApexModelSummary"]


def test_changes_nothing():
    model, witness = Wide(), Wide()
    fit(model, "O2", batches(2), callbacks=[ApexModelSummary(-1)])
    fit(witness, "O2", batches(2))
    assert_same(weights(model), weights(witness))


def test_depth_0_shows_nothing(capsys, caplog):
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        fit(Wide(), "O2", batches(1), callbacks=[ApexModelSummary(0)])
    assert "Dtype" not in capsys.readouterr().out + caplog.text


def test_rich_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("lightning_apex.plugins.summary.find_spec", lambda name: None)
    assert ApexModelSummary().rich is False
    with pytest.raises(ModuleNotFoundError, match="pip install rich"):
        ApexModelSummary(rich=True)
