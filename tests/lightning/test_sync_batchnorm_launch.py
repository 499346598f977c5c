"""apex_ddp as users start it: Lightning's CLI launches the processes, or torchrun does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
MAIN = """
import torch, lightning_apex
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.BatchNorm1d(width))

    def on_train_end(self):
        norm = self.layer[1]
        means = self.all_gather(norm.running_mean)
        print(f"rank {self.global_rank}: {type(norm).__name__}, same {torch.equal(means[0], means[1])}", flush=True)


if __name__ == "__main__":
    made = LightningCLI(Model, save_config_callback=None)
    print(f"after: {type(made.model.layer[1]).__name__}", flush=True)
"""
WORDS = ["fit", "--trainer.strategy=apex_ddp", "--trainer.accelerator=cpu", "--trainer.devices=2"]
WORDS += ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
WORDS += ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
WORDS += ["--trainer.plugins=lightning_apex.ApexPrecision", "--trainer.plugins.opt_level=O5"]
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1"]


@pytest.mark.parametrize("how", ["cli", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_apex_ddp_from_a_shell(how, tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    launcher = [] if how == "cli" else [*TORCHRUN, f"--master-port={free_port()}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, *launcher, "main.py", *WORDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: SyncBatchNorm, same True" in done.stdout
    assert done.stdout.count("after: BatchNorm1d") == 2
