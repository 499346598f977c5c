"""What mkdocs needs besides its plugins: README.md as the home page, files of the repository, formulas as MathML."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as index.md, and whatever pages link to outside docs/."""
    files.append(File.generated(config, "index.md", content=_home((ROOT / "README.md").read_text())))
    pages = [file for file in files.documentation_pages() if file.abs_src_path or file.src_uri == "index.md"]
    linked = {name for page in pages for name in _way_out(page).findall(str(page.content_string))}
    for name in sorted(linked | {"CHANGELOG.md", "CONTRIBUTING.md"}):
        if name != "README.md" and (ROOT / name).is_file():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links out of docs/ to the copies that on_files added, and drops comments, which are for the tests."""
    up = "../" * page.file.src_uri.count("/")
    text = _way_out(page.file).sub(lambda m: f"]({up}{'index.md' if m[1] == 'README.md' else m[1]}", markdown)
    return _COMMENT.sub("", text)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas become MathML, which browsers draw by themselves."""
    return _FORMULA.sub(lambda m: convert(html.unescape(m[3]), display="block" if m[2] == "[" else "inline"), content)


def _way_out(page: File) -> re.Pattern[str]:
    """Links out of docs/, which are right on the web host of the repository."""
    return re.compile(r"\]\(" + re.escape("../" * (page.src_uri.count("/") + 1)) + r"([^)#\s]+)")


def _home(readme: str) -> str:
    """README's links start from the repository's root: those into docs/ lose that folder, others get a way up."""
    text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", readme)
    return text.replace("](docs/", "](")
