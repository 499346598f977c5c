"""What the program makes of a LightningCLI config: the model, its data, and the Trainer settings that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")

import compare_models
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_apex import FusedAdam
from lightning_apex.cli.configs import Training, load_training
from lightning_apex.cli.errors import CommandError

HERE = Path(__file__).parent
NET = {"class_path": "compare_models.Net"}
BARE = {"class_path": "compare_models.Bare", "init_args": {"width": 5}}
DATA = {"class_path": "compare_models.Data"}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def from_text(content: Any, **words: Any) -> Training:
        path = tmp_path / "config.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return load_training(path, **words)

    return from_text


def test_model_data_optimizer_and_what_the_trainer_keeps(load: Any) -> None:
    config = {
        "seed_everything": 7,
        "ckpt_path": None,
        "model": BARE,
        "data": DATA | {"init_args": {"batch_size": 3}},
        "optimizer": {"class_path": "lightning_apex.FusedAdam", "init_args": {"lr": 0.02}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 4}},
        "trainer": {
            "max_epochs": 9, "max_steps": 3, "precision": "16-mixed", "gradient_clip_val": 0.5, "strategy": "ddp",
            "accumulate_grad_batches": 2, "limit_train_batches": 3, "devices": 4, "check_val_every_n_epoch": 2,
            "logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}, "accelerator": "cpu",
            "callbacks": [
                {"class_path": "compare_models.Remembers"},
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"},
                {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
                {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "x"}},
            ],
        },
    }  # fmt: skip
    training = load(config)
    assert type(training.model) is compare_models.Bare and training.model.net[0].out_features == 5
    assert training.data is not None and training.data.batch_size == 3
    kept = {k: training.trainer[k] for k in ("gradient_clip_val", "accumulate_grad_batches", "limit_train_batches")}
    assert kept == {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "limit_train_batches": 3}
    assert [type(callback).__name__ for callback in training.trainer["callbacks"]] == ["Remembers"]
    assert not {"max_epochs", "max_steps", "precision", "strategy", "check_val_every_n_epoch"} & training.trainer.keys()
    assert training.trainer["logger"] is False and training.trainer["devices"] == 1
    assert len(training.notes) == 2 and "One device" in training.notes[0] and "strategy" in training.notes[1]
    made = training.model.configure_optimizers()
    assert isinstance(made[0][0], FusedAdam) and made[0][0].defaults["lr"] == 0.02
    Trainer(**training.trainer)


def test_numbers_as_people_write_them(load: Any) -> None:
    text = """
model: {class_path: compare_models.Bare}
data: {class_path: compare_models.Data}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 1e-3, betas: [0.8, 0.9]}
trainer: {gradient_clip_val: 5e-1, limit_train_batches: 1e0}
"""
    training = load(text)
    assert training.model.configure_optimizers().defaults["lr"] == 1e-3
    assert training.trainer["gradient_clip_val"] == 0.5


def test_the_fit_section_of_a_config_with_subcommands(load: Any) -> None:
    training = load({"fit": {"model": NET, "data": DATA, "trainer": {"max_epochs": 3}}, "test": {"model": BARE}})
    assert type(training.model) is compare_models.Net


@pytest.mark.parametrize("words", ["module", "file"])
def test_classes_named_beside_a_config_that_has_their_arguments(words: str, load: Any) -> None:
    where = "compare_models" if words == "module" else str(HERE / "compare_models.py")
    config = {"model": {"width": 3}, "data": {"batches": 2}}
    training = load(config, model=f"{where}:Net", data=f"{where}:Data")
    assert training.model.net[0].out_features == 3 and training.data is not None and training.data.rows == 16


def test_no_config_at_all() -> None:
    training = load_training(model="compare_models:Net", data="compare_models:Data", accelerator="cpu")
    assert training.trainer["accelerator"] == "cpu" and training.notes == []


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's calls
@pytest.mark.parametrize("subclasses", [True, False])
@pytest.mark.parametrize("run", [True, False])
def test_configs_that_lightning_saved(run: bool, subclasses: bool, tmp_path: Path) -> None:
    words = [f"--trainer.default_root_dir={tmp_path}", "--trainer.accelerator=cpu", "--trainer.max_steps=1"]
    words += ["--trainer.accumulate_grad_batches=3", "--trainer.enable_progress_bar=false", "--seed_everything=3"]
    words += (
        ["--model=compare_models.Net", "--model.width=7", "--data=compare_models.Data"]
        if subclasses
        else ["--model.width=7"]
    )
    base = (LightningModule, LightningDataModule) if subclasses else (compare_models.Net, compare_models.Data)
    args = ["fit", *words, "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}"] if run else words
    made = LightningCLI(
        *base, subclass_mode_model=subclasses, subclass_mode_data=subclasses, args=args, run=run,
        save_config_kwargs={"overwrite": True},
    )  # fmt: skip
    saved = tmp_path / "config.yaml"
    if run:
        (saved,) = tmp_path.rglob("config.yaml")
    else:
        made.parser.save(made.config, str(saved), skip_check=True)
    names = {} if subclasses else {"model": "compare_models:Net", "data": "compare_models:Data"}
    training = load_training(saved, **names)
    assert training.model.net[0].out_features == 7 and training.trainer["accumulate_grad_batches"] == 3
    assert training.data is not None


def test_modules_are_found_beside_the_config(tmp_path: Path, load: Any) -> None:
    (tmp_path / "beside_it.py").write_text("from compare_models import Net\nclass Mine(Net):\n    pass\n")
    training = load({"model": {"class_path": "beside_it.Mine"}, "data": DATA})
    assert type(training.model).__name__ == "Mine"


def test_settings_of_the_users_plugin_that_no_level_decides(load: Any) -> None:
    arguments = {"opt_level": "O2", "loss_scale": 8.0, "keep_fp32": ["net.3"], "init_scale": 64.0}
    plugin = {"class_path": "lightning_apex.ApexPrecision", "init_args": arguments}
    training = load({"model": NET, "data": DATA, "trainer": {"plugins": [plugin]}})
    assert training.precision == {"keep_fp32": ["net.3"], "init_scale": 64.0}


def test_the_seed_decides_the_weights() -> None:
    def weight(seed: int) -> torch.Tensor:
        model = load_training(model="compare_models:Net", data="compare_models:Data", seed=seed).model
        return model.net[0].weight.detach()

    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))


BAD = [
    ({"model": NET, "data": DATA, "trainr": {}}, "config key 'trainr' is unknown: did you mean 'trainer'"),
    ({"model": NET, "data": DATA, "zebra": 1}, "config key 'zebra' is unknown: use one of model, data"),
    ({"model": NET, "data": DATA, "trainer": {"max_epoch": 3}}, "did you mean 'trainer.max_epochs'"),
    ({"model": NET | {"init_args": {"wdth": 3}}, "data": DATA}, "option 'wdth' is not accepted"),
    ({"model": NET | {"init_args": {"width": "x"}}, "data": DATA}, "'model.init_args.width'"),
    ({"model": {"class_path": "compare_models.Nine"}, "data": DATA}, "has no attribute 'Nine'"),
    ({"model": {"class_path": "nowhere.Net"}, "data": DATA}, "no module named 'nowhere'"),
    ({"model": NET, "data": DATA | {"init_args": {"batch": 3}}}, "config key 'data'"),
    ({"model": BARE, "data": DATA, "optimizer": {"class_path": "torch.optim.Adamm"}}, "config key 'optimizer'"),
    ({"model": BARE, "data": DATA}, "Bare has no optimizer: add `optimizer:`"),
    ({"model": NET}, "Net has no data: add `data:`"),
    ({"data": DATA}, "does not say which model"),
    ({"model": NET, "data": DATA, "trainer": {"gradient_clip_val": "x"}}, "'trainer.gradient_clip_val' is 'x'"),
    ("[1, 2]", "holds no sections"),
    ("a: [b", "is not YAML"),
    ("\0", "is not YAML"),
]


@pytest.mark.parametrize(("content", "said"), BAD)
def test_bad_configs_are_one_sentence_that_names_the_key(content: Any, said: str, load: Any) -> None:
    with pytest.raises(CommandError) as caught:
        load(content)
    assert said in str(caught.value)
    assert ("\n" not in str(caught.value) and str(caught.value).endswith(".")) or str(caught.value).endswith("?")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "nothing to train"),
        ({"model": "compare_models"}, "model='compare_models' names no class"),
        ({"model": "compare_models:Nine"}, "model='compare_models:Nine' cannot be imported: AttributeError"),
        ({"model": "nowhere:Net"}, "ModuleNotFoundError"),
        ({"model": "nowhere.py:Net"}, "there is no file nowhere.py"),
        ({"model": "compare_models:Data"}, "is no LightningModule"),
        ({"model": "compare_models:Net", "data": "compare_models:Net"}, "is no LightningDataModule"),
        ({"config": "nowhere.yaml"}, "config='nowhere.yaml' cannot be read: No such file"),
        ({"config": str(HERE)}, "Is a directory"),
    ],
)
def test_bad_names(words: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said.replace("(", r"\(")):
        load_training(**words)


def test_a_model_named_twice(load: Any) -> None:
    with pytest.raises(CommandError, match="both name a model"):
        load({"model": NET, "data": DATA}, model="compare_models:Net")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("trainer", [{}, {"accelerator": "gpu"}])
def test_a_model_that_needs_cuda(trainer: dict[str, Any], load: Any) -> None:
    with pytest.raises(CommandError, match="needs CUDA and there is no GPU here"):
        load({"model": {"class_path": "compare_models.MadeOnTheGPU"}, "data": DATA, "trainer": trainer})
