"""The folder that ``ranges --out`` writes: JSON, pictures, and one page with all of them in it."""

from __future__ import annotations

import base64
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_apex.cli import output
from lightning_apex.cli.probe import ModuleExponents
from lightning_apex.cli.ranging import pictures, table

if TYPE_CHECKING:
    from lightning_apex.cli.ranging.ranges import Ranges

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; }
img { max-width: 100%; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(30rem, 100%), 1fr)); gap: 1rem; }
"""


def save(ranges: Ranges, folder: str | Path) -> None:
    """Writes everything; each file is whole or not there, and the page comes last."""
    place = output.writable_folder(folder)
    modules = output.writable_folder(place / "modules")
    shown = [ranges.report.modules[name] for name in ranges.report.forward_order]
    shown += [m for m in ranges.report.modules.values() if m not in shown and m.counts["weights"].elements]
    images: dict[str, bytes] = {}
    with output.progress() as bars:
        bar = bars.add("pictures", total=len(shown) + 1)
        for module in shown:
            images[module.name] = pictures.png(pictures.of_module(module, ranges.init_scale))
            output.write_whole(modules / f"{_file_name(module.name)}.png", images[module.name])
            bar.advance()
        scales = pictures.png(ranges.plot_scales())
        output.write_whole(place / "scales.png", scales)
        bar.advance()
    output.write_whole(place / "report.json", output.json_text(ranges.as_json()))
    output.write_whole(place / "report.html", html(ranges, scales, shown, images))


def html(ranges: Ranges, scales: bytes, shown: list[ModuleExponents], images: dict[str, bytes]) -> str:
    """One page with everything in it; it loads nothing from elsewhere."""
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in table.HEADINGS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in table.cells(module, ranges.init_scale)) + "</tr>\n"
        for module in shown
        if not module.passes_on
    )
    items = "".join(f"<li>{escape(sentence)}</li>\n" for sentence in table.sentences(ranges))
    figures = "".join(f"<div>{_image(images[module.name], module.name or 'the model')}</div>\n" for module in shown)
    code = table.settings(ranges)
    title = escape(f"Ranges of {ranges.model}")
    versions = escape(", ".join(f"{name} {version}" for name, version in ranges.versions.items()))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p>{table.extent(ranges)}. {versions}</p>
{f"<pre>{escape(code)}</pre>" if code else ""}
<ul>
{items}</ul>
<p>{_image(scales, "gradients over the loss scale")}</p>
<h2>Modules</h2>
<table><thead><tr>{heads}</tr></thead><tbody>
{rows}</tbody></table>
<p>{escape(table.LEGEND)}</p>
<div class="pictures">
{figures}</div>
</body></html>
"""


def _image(png: bytes, text: str) -> str:
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name) or "model"
