"""Whoever mixes Lightning's packages reads which import is the right one."""

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from pl_support import NETS, batches, plugin, trainer

import lightning_apex
import lightning_apex.fabric
import lightning_apex.pl
import lightning_apex.pl.fabric

MIXED = {
    "pytorch_lightning": (pytorch_lightning, lightning_apex, "lightning_apex.pl."),
    "lightning": (lightning.pytorch, lightning_apex.pl, "lightning_apex."),
}


@pytest.mark.parametrize("package", MIXED)
@pytest.mark.parametrize("name", ["ApexPrecision", "ApexSyncBatchNorm", "ApexDDPStrategy"])
def test_in_a_trainer_of_the_other_package(name, package):
    top, wrong, right = MIXED[package]
    given = getattr(wrong, name)()
    options = {"strategy": given} if name == "ApexDDPStrategy" else {"plugins": [given]}
    with pytest.raises(Exception, match="invalid") as raised:
        top.Trainer(accelerator="cpu", logger=False, **options)
    assert f"the one for {top.__name__} is {right}{name}" in str(raised.value)


@pytest.mark.parametrize("package", MIXED)
@pytest.mark.parametrize("name", ["LossScaleMonitor", "ApexModelSummary"])
def test_callback_in_a_trainer_of_the_other_package(name, package):
    _, wrong, right = MIXED[package]
    made = trainer(package, "O1", callbacks=[getattr(wrong, name)()], enable_model_summary=True)
    with pytest.raises(Exception, match="write `from") as raised:
        made.fit(NETS[package](), batches())
    assert f"`from {right[:-1]} import {name}`" in str(raised.value)


@pytest.mark.parametrize("package", MIXED)
def test_model_of_the_other_package(package):
    """Lightning's Trainer refuses the model itself; a strategy may hand it over without one."""
    _, wrong, right = MIXED[package]
    made = plugin(wrong, "O2")
    with pytest.raises(Exception, match="write `from") as raised:
        made.convert_module(NETS[package]())
    assert f"`from {right[:-1]} import ApexPrecision`" in str(raised.value)
    made.convert_module(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("package", "wrong", "right"),
    [
        (lightning_fabric, lightning_apex.fabric, "lightning_apex.pl.fabric"),
        (lightning.fabric, lightning_apex.pl.fabric, "lightning_apex.fabric"),
    ],
)
def test_in_fabric_of_the_other_package(package, wrong, right):
    with pytest.raises(TypeError, match="invalid type") as raised:
        package.Fabric(accelerator="cpu", plugins=[wrong.ApexPrecision("O1")])
    assert f"the one for {package.__name__} is {right}.ApexPrecision" in str(raised.value)


def test_what_is_no_plugin_of_fabrics():
    with pytest.raises(TypeError, match=r"invalid type for plugin ApexSyncBatchNorm.*for lightning\.pytorch"):
        lightning.fabric.Fabric(accelerator="cpu", plugins=[lightning_apex.ApexSyncBatchNorm()])


@pytest.mark.parametrize(
    ("package", "ours", "right"),
    [
        (lightning.fabric, lightning_apex, "lightning_apex.fabric"),
        (lightning_fabric, lightning_apex.pl, "lightning_apex.pl.fabric"),
    ],
)
def test_a_trainers_plugin_in_fabric(package, ours, right):
    fabric = package.Fabric(accelerator="cpu", devices=1, plugins=[plugin(ours, "O1")])
    model = torch.nn.Linear(2, 1)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Exception, match=f"the one of {right}"):
        fabric.backward(model(torch.ones(1, 2)).sum())
