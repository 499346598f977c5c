"""The page docs/migration.md, made from the table: ``python -m lightning_apex.migrate.page > docs/migration.md``."""

from __future__ import annotations

from lightning_apex.migrate.names import SECTIONS
from lightning_apex.migrate.row import WORDS, Row
from lightning_apex.migrate.table import ARGUMENTS

_HEAD = """\
# From Apex

An old Apex loop runs after one changed import:

```python
import lightning_apex as apex  # was: import apex
from lightning_apex import amp  # was: from apex import amp
from lightning_apex.parallel import DistributedDataParallel as DDP
```

Let a program do it, and tell you what else there is:

```bash
pip install libcst
python -m lightning_apex.migrate path/to/project            # says for each Apex name what to write now
python -m lightning_apex.migrate path/to/project --write    # shows a diff, then rewrites the imports
```

It prints one line for each place: `ok` is right once the imports are, `write` is an import for `--write`, `hand` waits
for you. `--json` prints the same for other programs. The exit status is 0 when nothing is left to do, 1 when something
is, and 2 for bad usage. Comments and formatting stay, a file that is not valid Python is left alone, and a second run
changes nothing.

What the verdicts below mean: **same**: here, under our name. **better**: here, and mended. **torch's own**: torch, or a
library of its makers, has it by now. **gone**: nowhere, with the reason and what to write instead.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    for heading, rows in SECTIONS.items():
        parts.append(f"## {heading}\n\n| was | verdict | now | |\n|---|---|---|---|\n" + "".join(map(_line, rows)))
    lines = [f"- `{name}({argument}=)`: {now}.\n" for name, many in ARGUMENTS.items() for argument, now in many.items()]
    parts.append("## Arguments that are gone\n\n" + "".join(lines))
    return "\n".join(parts)


def _line(row: Row) -> str:
    name = f"`{row.name}`" + (" and what is in it" if row.covers else "")
    return f"| {name} | {WORDS[row.verdict]} | {row.now} | {row.note} |\n"


if __name__ == "__main__":
    print(page(), end="")
