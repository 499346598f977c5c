"""One CUDA GPU: optimizer steps by the device's clock, by the wall's and by the host's; and the tails of steps.

`python -m benchmarks.gpu`, from the repository's root. Training steps: `benchmarks.gpu_training`. BatchNorm:
`benchmarks.gpu_batchnorm`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks import gpu_family
from benchmarks.common import Contender, Result
from benchmarks.contenders import FOREACH, FUSED, OURS, Buffers, adamw, master_tails, scaled_tails
from benchmarks.gpu_common import Goals, Row, device_race, host_race, over, run_rows, wall_race
from benchmarks.gpu_roofline import COPY, COPY_BYTES, copy, traffic
from benchmarks.optimizers import STEP_BYTES
from benchmarks.report import Report
from lightning_apex.cli.benching import shapes
from lightning_apex.cli.benching.families import ROOF


def step_device(row: str, report: Report, chosen: shapes.Shapes, device: str, goals: Goals | None) -> None:
    """Large ones have goals: a kernel has to fill the device first."""
    buffers = Buffers(chosen, device)
    elements = sum(p.numel() for p in buffers.params)
    roofs = [Contender(ROOF, traffic(elements, device)), Contender(COPY, copy(elements, device))]
    result = device_race([*roofs, *adamw(buffers, (OURS, FUSED, FOREACH))], report.options, device)
    of_roof = (0.93, 0.97) if goals else (None, None)
    report.add(
        row,
        result,
        Result(row, f"of roofline at {STEP_BYTES} B", result.ratio(ROOF, OURS), *of_roof),
        Result(row, "of copy bandwidth", result.ratio(COPY, OURS, STEP_BYTES / COPY_BYTES)),
        over(row, result, FUSED, goals=goals),
        over(row, result, FOREACH),
    )


def family_device(row: str, report: Report, name: str, chosen: shapes.Shapes, device: str) -> None:
    buffers = Buffers(chosen, device)
    ways = gpu_family.contenders(name, buffers)
    roof = Contender(ROOF, traffic(sum(p.numel() for p in buffers.params), device))
    result = device_race([roof, *ways], report.options, device)
    family = gpu_family.FAMILIES[name]
    share = result.ratio(ROOF, OURS, family.bytes_moved / STEP_BYTES)
    peers = [over(row, result, way.name, goals=family.goals.get(way.name)) for way in ways if way.name != OURS]
    report.add(row, result, Result(row, f"of roofline at {family.bytes_moved} B", share), *peers)


def step_wall(row: str, report: Report, chosen: shapes.Shapes, device: str, goals: Goals | None) -> None:
    result = wall_race(adamw(Buffers(chosen, device), (OURS, FUSED, FOREACH)), report.options, device)
    report.add(row, result, over(row, result, FUSED, goals=goals), over(row, result, FOREACH))


def step_host(row: str, report: Report, chosen: shapes.Shapes, device: str) -> None:
    result = host_race(adamw(Buffers(chosen, device), (OURS, FUSED, FOREACH)), report.options, device)
    report.add(row, result, over(row, result, FUSED), over(row, result, FOREACH))


def tail(row: str, report: Report, chosen: shapes.Shapes, device: str, scaled: bool, goals: Goals | None) -> None:
    _, contenders = scaled_tails(chosen, device) if scaled else master_tails(chosen, device)
    result = wall_race(contenders, report.options, device)
    report.add(row, result, over(row, result, contenders[1].name, goals=goals))


def rows(quick: bool, device: str) -> Mapping[str, Row]:
    resnet = shapes.small(20, 1000) if quick else shapes.resnet50()
    gpt = shapes.small(5, 100_000) if quick else shapes.gpt2_small()
    few = shapes.small(16, 64) if quick else shapes.small(161, 4096)
    many = shapes.small(50, 100) if quick else shapes.small(10_000, 1000)
    return {
        "device: AdamW GPT-2": lambda row, report: step_device(row, report, gpt, device, (1.0, 1.1)),
        "device: AdamW ResNet-50": lambda row, report: step_device(row, report, resnet, device, None),
        "wall: AdamW ResNet-50": lambda row, report: step_wall(row, report, resnet, device, (3.0, 8.0)),
        "wall: AdamW 161 x 4096": lambda row, report: step_wall(row, report, few, device, (3.0, 8.0)),
        "wall: AdamW GPT-2": lambda row, report: step_wall(row, report, gpt, device, None),
        "wall: AdamW 10000 x 1000": lambda row, report: step_wall(row, report, many, device, None),
        "host: AdamW ResNet-50": lambda row, report: step_host(row, report, resnet, device),
        "O1 tail GPT-2": lambda row, report: tail(row, report, gpt, device, True, (1.45, 1.5)),
        "O1 tail 161 x 4096": lambda row, report: tail(row, report, few, device, True, (3.0, 6.0)),
        "O5 tail GPT-2": lambda row, report: tail(row, report, gpt, device, False, (1.6, 1.7)),
        **{
            f"device: {name} GPT-2": lambda row, report, name=name: family_device(row, report, name, gpt, device)
            for name in gpu_family.FAMILIES
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    return run_rows("gpu", __doc__, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
