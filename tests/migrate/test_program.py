"""The program: what it finds, what it rewrites, and what it leaves alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("libcst")

from lightning_apex.migrate.program import examine, main


def rewritten(source: str, tmp_path: Path) -> str:
    path = tmp_path / "case.py"
    path.write_text(dedent(source) + "# apex\n")  # a file without the word is not even parsed
    report = examine(path)
    assert not report.error, report.error
    return report.after.decode().removesuffix("# apex\n")


IMPORTS = [
    ("import apex", "import lightning_apex as apex"),
    ("import apex as A", "import lightning_apex as A"),
    ("import apex.amp", "import lightning_apex as apex"),
    ("import apex, apex.amp, os", "import lightning_apex as apex, os"),
    ("import os, apex.parallel  # both", "import os, lightning_apex as apex  # both"),
    ("import apex.amp as mixed", "import lightning_apex.amp as mixed"),
    ("from apex import amp", "from lightning_apex import amp"),
    ("from apex import amp as a, optimizers", "from lightning_apex import amp as a, optimizers"),
    ("from apex.optimizers import FusedAdam as Adam", "from lightning_apex.optimizers import FusedAdam as Adam"),
    ("from apex.optimizers.fused_adam import FusedAdam", "from lightning_apex.optimizers import FusedAdam"),
    ("from apex.optimizers import fused_adam", "from lightning_apex import optimizers as fused_adam"),
    ("from apex.parallel.LARC import LARC", "from lightning_apex.parallel import LARC"),
    ("from apex.normalization import FusedLayerNorm", "from torch.nn import LayerNorm as FusedLayerNorm"),
    ("from apex.normalization import FusedLayerNorm as LayerNorm", "from torch.nn import LayerNorm"),
    ("from apex.contrib.clip_grad import clip_grad_norm_", "from torch.nn.utils import clip_grad_norm_"),
    ("from apex.optimizers import *", "from lightning_apex.optimizers import *"),
    ("if x: from apex import amp; y = 1", "if x: from lightning_apex import amp; y = 1"),
    (
        "from apex import amp; import apex; z = 2",
        "from lightning_apex import amp; import lightning_apex as apex; z = 2",
    ),
    # not ours to change
    ("from apex import normalization", None),
    ("from apex import *", None),
    ("import apex.contrib.sparsity", None),
    ("import apex\nimport apex.contrib.sparsity", None),
    ("from . import apex", None),
    ("from .apex import amp", None),
    ("import apexcharts, my.apex", None),
    ("x = 'import apex'  # import apex", None),
    ("import amp_C", None),
]


@pytest.mark.parametrize(("source", "wanted"), IMPORTS, ids=[source for source, _ in IMPORTS])
def test_imports(source: str, wanted: str | None, tmp_path: Path) -> None:
    assert rewritten(source + "\n", tmp_path) == (source if wanted is None else wanted) + "\n"
    assert rewritten((wanted or source) + "\n", tmp_path) == (wanted or source) + "\n"  # a second run


def test_an_import_is_split_by_where_its_names_are_now_and_comments_stay(tmp_path: Path) -> None:
    source = """\
    # before
    try:
        # inside
        from apex.parallel import (  # open
            DistributedDataParallel as DDP,  # wraps

            Reducer,  # sums
            LARC,  # scales
        )  # closed
        from apex import amp, normalization  # noqa: F401
        HAVE_APEX = True
    except ImportError:   # odd   spacing
        HAVE_APEX = False
    from apex.normalization import (FusedLayerNorm,
        FusedRMSNorm)
    x = {  1:2 }
    """
    wanted = """\
    # before
    try:
        # inside
        from lightning_apex.parallel import (  # open
            DistributedDataParallel as DDP,  # wraps

            LARC,  # scales
        )
        from apex.parallel import (  # open
            Reducer,  # sums
        )  # closed
        from lightning_apex import amp  # noqa: F401
        from apex import normalization  # noqa: F401
        HAVE_APEX = True
    except ImportError:   # odd   spacing
        HAVE_APEX = False
    from torch.nn import (LayerNorm as FusedLayerNorm,
        RMSNorm as FusedRMSNorm)
    x = {  1:2 }
    """
    assert rewritten(source, tmp_path) == dedent(wanted)
    assert rewritten(wanted, tmp_path) == dedent(wanted)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("from apex.parallel import (\n    LARC,  # a\n    Reducer\n)\n", "(\n    LARC,  # a\n)\n"),
        ("from apex.parallel import (LARC, Reducer)\n", "(LARC)\n"),
        ("from apex.parallel import (LARC, Reducer,)\n", "(LARC)\n"),
        ("from apex.parallel import (\n    LARC, Reducer,\n)\n", "(\n    LARC,\n)\n"),
        ("from apex.parallel import LARC, Reducer\n", "LARC\n"),
    ],
)
def test_parentheses_close_as_before(source: str, wanted: str, tmp_path: Path) -> None:
    after = rewritten(source, tmp_path)
    compile(after, "after", "exec")
    assert after.startswith("from lightning_apex.parallel import " + wanted)
    assert "from apex.parallel import" in after and after.count("Reducer") == 1


def test_line_ends_encodings_and_a_missing_last_newline_stay(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_bytes("# -*- coding: latin-1 -*-\r\nimport apex\r\nname = 'é'".encode("latin-1"))
    assert examine(path).after == "# -*- coding: latin-1 -*-\r\nimport lightning_apex as apex\r\nname = 'é'".encode(
        "latin-1"
    )


SCRIPT = """\
import apex
from apex import amp
from apex.normalization import FusedLayerNorm
import apex.normalization
from apex.optimizers import FusedSGD
from pytorch_lightning import Trainer
from pytorch_lightning.plugins import ApexMixedPrecisionPlugin
model = apex.parallel.convert_syncbn_model(model)
norm = FusedLayerNorm(8)
norm2 = apex.normalization.FusedLayerNorm(8)
optimizer = FusedSGD(model.parameters(), lr=0.1, materialize_master_grads=False)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
scale = amp._amp_state.loss_scalers[0].loss_scale()
trainer = Trainer(amp_backend="apex", amp_level="O1")
main(amp_level=3)
available = importlib.util.find_spec("apex") is not None
available = find_spec("apexcharts")
self.apex.amp = thing.amp.initialize()
"""


def test_each_use_is_found_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(SCRIPT)
    found = [(f.line, f.name, f.action) for f in examine(path).findings]
    assert found == [
        (1, "apex", "hand"),  # line 4 binds the same name, and stays
        (2, "apex.amp", "write"),
        (3, "apex.normalization.FusedLayerNorm", "write"),
        (4, "apex.normalization", "hand"),
        (5, "apex.optimizers.FusedSGD", "write"),
        (7, "pytorch_lightning.plugins.ApexMixedPrecisionPlugin", "hand"),
        (8, "apex.parallel.convert_syncbn_model", "hand"),
        (9, "apex.normalization.FusedLayerNorm", "none"),
        (10, "apex.normalization.FusedLayerNorm", "hand"),
        (11, "apex.optimizers.FusedSGD", "none"),
        (11, "apex.optimizers.FusedSGD(materialize_master_grads=)", "hand"),
        (12, "apex.amp.initialize", "none"),
        (13, "apex.amp._amp_state.loss_scalers.loss_scale", "hand"),
        (14, "Trainer(amp_backend=)", "hand"),
        (14, "Trainer(amp_level=)", "hand"),
        (16, "apex", "hand"),
    ]
    advice = {f.line: f.now for f in examine(path).findings}
    assert 'ApexPrecision("O1")' in advice[14] and "ApexPrecision" in advice[7] and "amp.state_dict" in advice[13]
    assert [f.column for f in examine(path).findings][:2] == [8, 18]


def test_uses_that_wait_are_found_again_after_the_imports_were_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text("import apex\nnorm = apex.normalization.FusedLayerNorm(8)\napex.amp.initialize(model)\n")
    assert main([str(path), "--write"]) == 1
    assert path.read_text().startswith("import lightning_apex as apex\n")
    assert [(f.line, f.action) for f in examine(path).findings] == [(2, "hand")]
    assert main([str(path), "--write"]) == 1
    path.write_text(path.read_text().replace("apex.normalization.FusedLayerNorm", "torch.nn.LayerNorm"))
    assert main([str(path)]) == 0


def test_a_diff_comes_first_then_the_file_then_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    source = "#!/usr/bin/env python\nfrom apex import amp\n"
    path.write_text(source)
    path.chmod(0o755)
    assert main([str(path)]) == 1  # something is left to do
    assert path.read_text() == source
    out = capsys.readouterr().out
    assert f"write {path}:2:18: apex.amp (same): `lightning_apex.amp`" in out and "1 import for --write" in out
    assert main([str(path), "--write"]) == 0
    out = capsys.readouterr().out
    diff, done = out.index("-from apex import amp\n+from lightning_apex import amp\n"), out.index("are rewritten")
    assert diff < done and "1 import rewritten; nothing by hand" in out
    assert path.read_text() == source.replace("from apex", "from lightning_apex")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    before = path.stat()
    assert main([str(path), "--write"]) == 0
    assert capsys.readouterr().out == "Nothing of Apex was found.\n"
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_searched_but_not_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = [".git", ".venv", "env", "conda", "node_modules", "__pycache__", "lib/site-packages"]
    for folder in ("src/deep", *skipped):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("import apex\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "conda" / "conda-meta").mkdir()
    (tmp_path / "src" / "notes.txt").write_text("import apex\n")
    (tmp_path / "script").write_text("import apex\n")
    assert main([str(tmp_path), str(tmp_path / "script"), "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [report["file"] for report in reports] == [str(tmp_path / "src/deep/a.py"), str(tmp_path / "script")]
    (finding,) = reports[0]["findings"]
    assert finding["line"] == 1 and finding["action"] == "write" and finding["verdict"] == "same"
    assert "+import lightning_apex as apex" in reports[0]["diff"] and reports[0]["written"] is False
    assert main([str(tmp_path / "src"), "--json", "--write"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["written"] is True


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"from apex import amp\nprint 'old'\n", "not valid Python"),
        (b"import apex\n\xff\xfe = 1\n", "cannot be read"),
        (b"# coding: no-such-code\nimport apex\n", "cannot be read"),
        (b"\x00import apex\n", "left alone"),
    ],
)
def test_what_does_not_parse_is_left_alone(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_bytes(content)
    good.write_text("import apex\n")
    assert main([str(tmp_path), "--write"]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: left alone" in out and said in out and "1 file left alone" in out
    assert bad.read_bytes() == content
    assert good.read_text() == "import lightning_apex as apex\n"


def test_a_link_stays_a_link_and_a_failed_write_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("import apex\n")
    link.symlink_to(real)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main([str(link), "--write"]) == 1
    assert "no space left" in capsys.readouterr().out
    assert real.read_text() == "import apex\n" and set(tmp_path.iterdir()) == {real, link}
    assert main([str(link), "--write"]) == 0
    assert link.is_symlink() and real.read_text() == "import lightning_apex as apex\n"


def test_a_file_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    from lightning_apex.migrate.program import write

    path = tmp_path / "case.py"
    path.write_text("import apex\n")
    report = examine(path)
    path.write_text("import apex  # edited\n")
    write(report)
    assert "changed meanwhile" in report.error and not report.written
    assert path.read_text() == "import apex  # edited\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "PATH"), (["nowhere.py"], "nowhere.py does not exist"), (["--rewrite", "."], "--rewrite")],
)
def test_bad_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_notebook_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "a.ipynb")])
    assert "nbconvert" in capsys.readouterr().err


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    command = [sys.executable, "-m", "lightning_apex.migrate", str(tmp_path)]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Nothing of Apex was found.\n"), done.stderr
