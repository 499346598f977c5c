"""What importing needs, costs and says; each in a process of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_apex

PACKAGE = Path(lightning_apex.__file__).parent
WITHOUT_LIGHTNING = (
    "import sys; sys.modules.update({'lightning': None, 'pytorch_lightning': None, 'lightning_fabric': None})\n"
)


def python(code: str, path: Path = PACKAGE.parent) -> str:
    """Runs code with the package found in ``path``; returns what it printed."""
    start = f"import sys; sys.path.insert(0, {str(path)!r})\n"
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", start + code], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_lightning_everything_but_the_plugins_works():
    output = python(
        WITHOUT_LIGHTNING
        + """
import lightning_apex, torch
from lightning_apex import FusedAdam, FusedSGD, LossScaler, OptLevelError, LossScaleError
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve
model = torch.nn.Linear(2, 1)
engine = PrecisionEngine(resolve("O2").on("cpu"), LossScaler())
engine.convert(model, "cpu")
optimizer = FusedAdam(model.parameters())
engine.adopt([optimizer])
with engine.forward_context():
    loss = model(torch.ones(1, 2)).float().sum()
engine.scale(loss).backward()
assert not engine.finish(optimizer).was_skipped()
engine.restore()
assert not torch.cuda.is_initialized()
assert not {"sklearn", "matplotlib", "scipy", "pandas"} & set(sys.modules), "imported without need"
for name in ("ApexPrecision", "LossScaleMonitor"):
    try:
        getattr(lightning_apex, name)
    except ImportError as error:
        print(error)
try:
    lightning_apex.no_such_name
except AttributeError as error:
    print(error)
from lightning_apex import *
"""
    )
    lines = output.splitlines()
    assert "ApexPrecision" in lines[0] and "pip install 'lightning" in lines[0]
    assert "LossScaleMonitor" in lines[1] and "pip install 'lightning" in lines[1]
    assert "no_such_name" in lines[2]


@pytest.mark.slow
def test_with_lightning_it_adds_nothing_heavy():
    pytest.importorskip("lightning")
    python(
        """
import lightning.pytorch, torch
before = set(sys.modules)
import lightning_apex
assert issubclass(lightning_apex.ApexPrecision, lightning.pytorch.plugins.Precision)
added = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not added & {"sklearn", "matplotlib", "scipy", "pandas", "torchvision"}, added
assert not torch.cuda.is_initialized()
assert torch.get_default_dtype() is torch.float32 and not torch.is_autocast_enabled("cpu")
assert set(lightning_apex.__all__) <= set(dir(lightning_apex))
"""
    )


TRY = """
# An editable installation would find the extension that is missing here.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]

def attempt():
    for name in [n for n in sys.modules if n.split(".")[0] == "lightning_apex"]:
        del sys.modules[name]
    try:
        import lightning_apex
    except ImportError as error:
        print(" ".join(str(error).splitlines()))
"""


def test_without_the_extension_one_sentence_says_what_to_type(tmp_path):
    """In a checkout, in an installation, and with extensions that fit another torch."""
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for place in (checkout, installed):
        shutil.copytree(
            PACKAGE, place / PACKAGE.name, ignore=shutil.ignore_patterns("_C.*.so", "_C.*.pyd", "__pycache__")
        )
    (checkout / "csrc").mkdir()
    (checkout / "setup.py").touch()
    output = python(
        TRY
        + f"""
import types
attempt()
sys.path.insert(0, {str(installed)!r})
attempt()
import importlib.util
class Fake:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "lightning_apex._C" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        if self.error:
            raise ImportError(self.error)
        module.build_info = lambda: {{"torch_version": "1.13.0", "cuda_version": None}}
fake = Fake()
sys.meta_path.insert(0, fake)
for fake.error in (None, "libfoo.so: undefined symbol: _ZN3c10", "something else"):
    attempt()
""",
        checkout,
    ).splitlines()
    assert len(output) == 5, output
    assert "has not been built" in output[0] and f"pip install --no-build-isolation -e {checkout}" in output[0]
    assert (
        "has not been built" in output[1]
        and "pip install --no-build-isolation" in output[1]
        and " -e " not in output[1]
    )
    assert "was built for torch 1.13.0" in output[2] and "pip install" in output[2]
    assert "built for another torch" in output[3] and "pip install" in output[3]
    assert "something else" in output[4] and "pip install" in output[4]


def test_the_build_can_be_asked_for():
    info = lightning_apex.build_info()
    assert {"version", "torch_version", "compiler", "cuda_version", "cuda_archs", "cpu_backends"} <= set(info)
    assert info["version"] == lightning_apex.__version__
    assert lightning_apex.has_cuda() is (info["cuda_version"] is not None)
    info["version"] = "changed"
    assert lightning_apex.build_info()["version"] == lightning_apex.__version__
    assert lightning_apex.ops.cpu_backend() in info["cpu_backends"]
