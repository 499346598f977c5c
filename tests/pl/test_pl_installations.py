"""Where only one of Lightning's packages is installed, its plugins work; each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIT = """
import logging, torch, {top} as top
from {ours} import ApexDDPStrategy, ApexPrecision, ApexSyncBatchNorm, LossScaleMonitor
from {top}.demos.boring_classes import BoringModel

class Model(BoringModel):
    def configure_optimizers(self):
        return lightning_apex.FusedAdam(self.parameters(), lr=0.01)

quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
model = Model()
before = model.layer.weight.detach().clone()
trainer = top.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=3, limit_val_batches=1, gradient_clip_val=0.1,
    plugins=[ApexPrecision("O2", half_dtype="bfloat16"), ApexSyncBatchNorm()], callbacks=[LossScaleMonitor()], **quiet,
)
trainer.fit(model)
assert not torch.equal(before, model.layer.weight) and model.layer.weight.dtype is torch.float32
assert trainer.callback_metrics["loss_scale"] == 65536
assert type(top.strategies.StrategyRegistry.get("apex_ddp")) is ApexDDPStrategy
from {fabric} import ApexPrecision
assert ApexPrecision("O5").precision == "bf16-mixed"
print("fitted")
"""


def python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_pytorch_lightning():
    out = python(
        "import sys; sys.modules['lightning'] = None\nimport lightning_apex, lightning_apex.plugins\n"
        + FIT.format(top="pytorch_lightning", ours="lightning_apex.pl", fabric="lightning_apex.pl.fabric")
        + """
for wrong in ("from lightning_apex import ApexPrecision", "import lightning_apex.fabric"):
    try:
        exec(wrong)
    except ImportError as error:
        print(error)
assert "ApexPrecision" not in lightning_apex.__all__
"""
    ).splitlines()
    assert "fitted" in out
    assert "needs Lightning" in out[-2] and "lightning_apex.pl " in out[-2]
    assert "needs Lightning" in out[-1] and "lightning_apex.pl.fabric" in out[-1]


def test_only_lightning():
    out = python(
        "import sys; sys.modules.update(dict.fromkeys(('pytorch_lightning', 'lightning_fabric')))\n"
        "import lightning_apex\n"
        + FIT.format(top="lightning.pytorch", ours="lightning_apex", fabric="lightning_apex.fabric")
        + """
print(ApexPrecision("O1"))
try:
    import lightning_apex.pl
except ImportError as error:
    print(error)
"""
    ).splitlines()
    assert "fitted" in out
    assert "(for lightning.fabric" in out[-2] and "lightning_fabric" not in out[-2]
    assert "pip install 'pytorch-lightning" in out[-1] and "import from lightning_apex," in out[-1]


def test_the_package_imports_the_other_one_only_when_asked():
    python(
        """
import sys, lightning_apex, lightning_apex.fabric
assert not {"pytorch_lightning", "lightning_fabric"} & set(sys.modules)
str(lightning_apex.ApexPrecision("O1"))
assert not {"pytorch_lightning", "lightning_fabric"} & set(sys.modules)
"""
    )


RANKS = """
import torch, pytorch_lightning as top, lightning_apex.pl
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_apex import FusedSGD


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 4), torch.nn.BatchNorm1d(4))

    def configure_optimizers(self):
        return FusedSGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        weights = self.all_gather(torch.cat([v.flatten().float() for v in self.state_dict().values()]))
        name = type(self.layer[1]).__name__
        print(f"rank {self.global_rank}: {name}, same {torch.equal(weights[0], weights[1])}", flush=True)


if __name__ == "__main__":
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    model = Model()
    top.Trainer(
        accelerator="cpu", devices=2, strategy="apex_ddp_fork", max_epochs=1, limit_train_batches=2,
        limit_val_batches=0, plugins=[lightning_apex.pl.ApexPrecision("O5")], **quiet,
    ).fit(model)
    print(f"after: {type(model.layer[1]).__name__}, {model.layer[0].weight.dtype}")
"""


@pytest.mark.distributed
def test_two_processes(tmp_path):
    (tmp_path / "main.py").write_text(RANKS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "main.py"], capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: SyncBatchNorm, same True" in done.stdout
    assert "after: BatchNorm1d, torch.float32" in done.stdout
