"""Stands for a run of a comparison, without torch: ``fake_child.py PLAN TASK EVENTS``; PLAN names what happens."""

import json
import os
import signal
import sys
import time
from pathlib import Path

plan, task, events = json.loads(Path(sys.argv[1]).read_text()), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
name = f"{task['level']}-seed{task['seed']}"
with open(sys.argv[1] + ".calls", "a") as calls:
    calls.write(name + "\n")
Path(sys.argv[1] + ".task").write_text(json.dumps(task))
what = plan.get(name, "finish")


def emit(kind: str, **event: object) -> None:
    with open(events, "a") as file:
        file.write(json.dumps({"kind": kind, **event}) + "\n")


if what == "dies early":
    sys.exit("ImportError: something is not there")
if what == "bad":
    emit("end", status="bad input", error="the model is no good: mend it.")
    sys.exit(1)
emit("begin", device="a device", half_dtype="", notes=[])
for step in range(task["steps"]):
    fast = 1.0 if task["level"] == "O0" else 0.5
    loss, scale = 3.0 / (step + 1), 1.0
    if what == "skips":
        loss, scale = (None if step == 1 else loss), (65536.0 if step < 1 else 32768.0)
        if step == 1:
            emit("overflow", step=2, old_scale=65536.0, new_scale=32768.0, modules=["net.0", ""])
    emit("step", losses={} if what == "silent" else {"loss": loss}, seconds=fast, timed=True, scale=scale)
    if step == 1 and what == "killed":
        with open(events, "a") as file:
            file.write('{"kind": "step", "lo')  # cut short
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 1 and what == "hangs":
        with open(sys.argv[1] + ".pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    if step == 1 and what == "fails":
        emit("end", status="failed", error="ValueError: no")
        sys.exit(1)
sizes = {"weights": 100, "masters": 0, "gradients": 100, "optimizer": 200, "activations": 50, "cuda_peak": None}
emit("memory", **sizes)
emit("end", status="finished", error="")
