"""Every code block of README and of the pages does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import shell_lines
import yaml
from markdown_blocks import PAGES, ROOT, Block, blocks, needs

pytest.importorskip("jsonargparse")
WITH_CODE = [page for page in PAGES if any(block.language != "text" for block in blocks(page))]
WITH_SLOW_CODE = [page for page in PAGES if any(block.note == "slow" for block in blocks(page))]
LANGUAGES = ("python", "yaml", "bash", "text")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_its_language(page: Path) -> None:
    assert [block.where for block in blocks(page) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_blocks_run(page: Path, quiet_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runner(quiet_folder, monkeypatch).run(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SLOW_CODE, ids=name)
def test_slow_blocks_run(page: Path, quiet_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runner(quiet_folder, monkeypatch).run(page, slow=True)


class Runner:
    """Runs the blocks of one page in one module, in their order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.module = ModuleType("docs_page")  # a real module, so that its classes pickle
        monkeypatch.setitem(sys.modules, "docs_page", self.module)

    def run(self, page: Path, *, slow: bool) -> None:
        for module in needs(page):
            pytest.importorskip(module, exc_type=ImportError)
        for block in blocks(page):
            if block.note.startswith("syntax only"):
                self.read(block)
            elif block.language == "text" or (block.note == "slow" and not slow):
                continue
            elif block.title:
                self.read(block)
                (self.folder / block.title).write_text(block.text)
            else:
                getattr(self, f"run_{block.language}")(block)

    def read(self, block: Block) -> None:
        """Sees whether a block could be read by what reads its language."""
        if block.language == "python":
            compiled(block)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block.where
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)

    def run_python(self, block: Block) -> None:
        exec(compiled(block), self.module.__dict__)

    def run_yaml(self, block: Block) -> None:
        """The file that `main.py` of the page takes, or any LightningCLI program."""
        (self.folder / "block.yaml").write_text(block.text)
        program = self.folder / "main.py"
        if not program.is_file():
            program = Path(__file__).with_name("any_program.py")
            self.monkeypatch.syspath_prepend(str(program.parent))
        self.monkeypatch.setattr(sys, "argv", [str(program), "fit", "--config", "block.yaml", "--print_config"])
        with pytest.raises(SystemExit) as end:
            shell_lines.runpy.run_path(str(program), run_name="__main__")
        assert end.value.code in (0, None), block.where

    def run_bash(self, block: Block) -> None:
        for words in shell_lines.words_of(block.text):
            shell_lines.check(words, self.folder, self.monkeypatch)


def compiled(block: Block) -> object:
    """The code of a block; a traceback shows the page's lines."""
    return compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
