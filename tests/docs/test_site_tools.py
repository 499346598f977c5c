"""What the site needs besides mkdocs: docstrings become Markdown, and nothing is loaded from another host."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from markdown_blocks import ROOT

pytest.importorskip("griffe", reason="the extra 'docs' is not installed")


@pytest.fixture(scope="module")
def rest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_rest", ROOT / "tools" / "docs_rest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        (r"rate :math:`\eta`.", r"rate \(\eta\)."),
        (":math:`a\n    b`", r"\(a b\)"),
        ("A.\n\n.. math::\n    x = 1\n\nB.", "A.\n\\[x = 1\\]\nB."),
        (".. math::\n    a &= 1 \\\\\n    b &= 2\n", "\\[\\begin{align*}a &= 1 \\\\ b &= 2\\end{align*}\\]"),
        (".. code-block:: python\n\n    x = 1\n    if x:\n        y", "```python\nx = 1\nif x:\n    y\n```"),
        ("== ==\na  b\n== ==\n1  a long cell\n== ==", "| a | b |\n|---|---|\n| 1 | a long cell |"),
        ("Plain *text* with ``code``.", "Plain *text* with ``code``."),
    ],
)
def test_rest_becomes_markdown(rest: ModuleType, text: str, becomes: str) -> None:
    assert [line for line in rest.markdown(text).splitlines() if line] == becomes.splitlines()


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(
            r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//([^"/]+)', page.read_text()
        )
        assert loaded == [], page.name
        assert "\\(" not in re.sub(r"<(script|code).*?</\1>", "", page.read_text(), flags=re.DOTALL), page.name
    for style in tmp_path.rglob("*.css"):
        assert re.findall(r"url\(\s*['\"]?(?:https?:)?//", style.read_text()) == [], style.name
