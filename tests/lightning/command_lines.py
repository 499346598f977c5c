"""Command lines, each run as from a shell in a process that has imported nothing of lightning_apex.

One process imports torch and Lightning and forks once a command, which takes a fraction of the time of new processes.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Command:
    """A command line.

    Attributes:
        script: The text of the script.
        args: Its arguments.
        environ: Environment variables that it has besides.
    """

    script: str
    args: list[str]
    environ: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a command line."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        """What the script told of itself; see `cli_model.tell`."""
        lines = [line for line in self.out.splitlines() if line.startswith("OUTCOME ")]
        assert self.code == 0 and lines, self.out + self.err
        return json.loads(lines[-1].removeprefix("OUTCOME "))


def run(commands: dict[str, Command], folder: Path) -> dict[str, Outcome]:
    """Runs command lines in order, each in a folder of its name, below another one."""
    jobs = [(name, c.script, c.args, str(folder / name), c.environ) for name, c in commands.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    root = HERE.parents[1]
    environ = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    subprocess.run([sys.executable, __file__, str(folder)], env=environ, check=True, timeout=280)
    texts = {name: [(folder / f"{name}.{kind}").read_text() for kind in ("code", "out", "err")] for name in commands}
    return {name: Outcome(int(code), out, err) for name, (code, out, err) in texts.items()}


def _main(folder: Path) -> None:
    import lightning.pytorch.cli

    assert lightning.pytorch.cli.LightningCLI
    assert not any(name.startswith("lightning_apex") for name in sys.modules)
    for name, script, args, where, environ in json.loads((folder / "jobs.json").read_text()):
        Path(where).mkdir(exist_ok=True)
        pid = os.fork()
        if pid == 0:
            _child(folder / name, script, args, where, environ)
        (folder / f"{name}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _child(files: Path, script: str, args: list[str], where: str, environ: dict[str, str]) -> None:
    code = 1
    try:
        for fd, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{files}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
        os.environ.update(environ)
        os.chdir(where)
        Path("main.py").write_text(script)
        sys.argv = ["main.py", *args]
        runpy.run_path("main.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
