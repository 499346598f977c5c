"""A comparison as one HTML page that needs no other file."""

from __future__ import annotations

import shlex
from html import escape
from typing import TYPE_CHECKING, Any

from lightning_apex.cli.comparing import pictures
from lightning_apex.cli.comparing.table import HEADINGS, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_apex.cli.comparing.comparison import Comparison

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.answer { border-left: 5px solid #0072b2; background: #f2f7fb; padding: .8rem 1.2rem; }
.answer b { font-size: 1.3rem; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
tr.best { background: #eaf4ea; font-weight: 600; } tr.out { color: #999; }
figure { margin: 1rem 0; overflow-x: auto; } svg { width: 100%; height: auto; }
code { background: #f4f4f4; padding: .1rem .3rem; } pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; }
.small { font-size: .88rem; color: #555; }
"""
_MOST_LOSSES = 4


def page(comparison: Comparison) -> str:
    """The whole page."""
    level, reason = comparison.recommendation.level, comparison.recommendation.reason
    answer = f"Use {level}" if level else "No recommendation"
    parts = [
        "<h1>Opt levels compared</h1>",
        f'<p class="answer"><b>{escape(answer)}</b>{escape(reason)}</p>',
        _how_to_use(level),
        _table(comparison),
        _list("What else was found", comparison.findings),
        *_figures(comparison),
        _made_with(comparison.settings, comparison),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Opt levels compared</title>'
        f"<style>\n{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _how_to_use(level: str | None) -> str:
    if level is None:
        return ""
    return f'<pre>Trainer(plugins=[ApexPrecision("{level}")])</pre>'


def _table(comparison: Comparison) -> str:
    out = {j.level for j in comparison.judgements if j.trouble}
    best = comparison.recommendation.level
    lines = ["<h2>The levels</h2>", "<table><tr>", *(f"<th>{escape(heading)}</th>" for heading in HEADINGS), "</tr>"]
    for row in rows(comparison):
        kind = ' class="best"' if row[0] == best else ' class="out"' if row[0] in out else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    lines.append("</table>")
    lines.append(
        '<p class="small">From O0: the mean absolute difference of smoothed losses to the O0 run of the same seed, '
        "over the second half; spread: the same between O0's own seeds. A level within one and a half times the spread "
        "learns as O0 does. ms: the median time of a step. MiB: weights, fp32 masters, gradients, optimizer state, and "
        "the most that was saved for a backward pass.</p>"
    )
    return "".join(lines)


def _list(heading: str, sentences: list[str]) -> str:
    if not sentences:
        return ""
    return f"<h2>{heading}</h2><ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _figures(comparison: Comparison) -> list[str]:
    runs = comparison.runs
    names = pictures.loss_names(runs)[:_MOST_LOSSES]
    figures = [
        ("Losses", [pictures.single(pictures.draw_losses, runs, name) for name in names]),
        ("Distance to O0", [pictures.single(pictures.draw_distances, runs, name) for name in names]),
        ("Time", [pictures.single(pictures.draw_times, comparison.judgements, height=2.6)]),
        ("Memory", [pictures.single(pictures.draw_memory, runs, height=2.6)]),
    ]
    scaled = [run for run in runs if any(scale != 1.0 for scale in run.scales)]
    if scaled:
        figures.append(("Loss scale", [pictures.single(pictures.draw_scales, scaled, height=2.6)]))
    return [f"<h2>{heading}</h2>" + "".join(map(_figure, drawn)) for heading, drawn in figures if drawn]


def _figure(figure: Figure) -> str:
    return f"<figure>{pictures.svg(figure)}</figure>"


def _made_with(settings: dict[str, Any], comparison: Comparison) -> str:
    runs = comparison.runs
    levels = list(dict.fromkeys(run.level for run in runs))
    seeds = len({run.seed for run in runs})
    words = ["lightning-apex", "compare"]
    for name in ("config", "model", "data", "half_dtype", "accelerator"):
        if settings.get(name) is not None:
            words += [f"--{name}", str(settings[name])]
    words += ["--levels", *levels, "--steps", str(settings["steps"]), "--seeds", str(seeds)]
    versions = ", ".join(f"{name} {number}" for name, number in settings.get("versions", {}).items())
    devices = ", ".join(dict.fromkeys(run.device for run in runs if run.device))
    return (
        f"<h2>How this was made</h2><pre>{escape(shlex.join(words))}</pre>"
        f'<p class="small">{escape(devices)}; {escape(versions)}.</p>'
    )
