"""`mpiddp bench start`: the time from the command to the end of the first all-reduce, beside torchrun.

Both launchers start the same env:// script on this machine over gloo, in turn within every round. The first
round only warms the page cache. CPU time counts every process of the job.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import Spread, aligned, ratios, shown, spread, turns
from mpiddp.bench.jobs import BenchJobFailed, Jobs, launch_command, note, progress, time_command
from mpiddp.bench.options import option, wholes

SCRIPT = str(Path(__file__).with_name("all_reduces.py"))
LAUNCHERS = ("mpiddp", "torchrun")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = option("numbers of ranks", type=wholes(1), default="2,4,8,16,32")
    rounds: int = option("rounds of both launchers", type=whole(1), default=5)


class Start(TypedDict):
    wall_s: float
    cpu_s: float


class Point(TypedDict):
    """All starts of one number of ranks: of each launcher, and the "ratio" of the two."""

    ranks: int
    wall_s: dict[str, Spread]
    cpu_s: dict[str, Spread]


class Results(TypedDict):
    points: list[Point]


def measure(options: Options, jobs: Jobs) -> Results:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be more ranks than GPUs
    points: list[Point] = []
    for ranks in options.ranks:
        try:
            points.append(_point(ranks, options.rounds, jobs.timeout_s))
        except BenchJobFailed as failure:
            if not points:
                raise
            note(f"start: a job of {ranks} ranks failed and is left out: {failure}")
    return {"points": points}


def _point(ranks: int, rounds: int, timeout_s: float) -> Point:
    starts: dict[str, list[Start]] = {launcher: [] for launcher in LAUNCHERS}
    for number, launcher in turns(LAUNCHERS, rounds, warmup=1):
        start = time_start(launcher, ranks, timeout_s)
        if number > 0:
            starts[launcher].append(start)
            progress(f"start, {launcher}", ranks, number, rounds, f"{start['wall_s']:.2f} s")
    wall_s = {name: [each["wall_s"] for each in starts[name]] for name in LAUNCHERS}
    cpu_s = {name: [each["cpu_s"] for each in starts[name]] for name in LAUNCHERS}
    return {"ranks": ranks, "wall_s": _compared(wall_s), "cpu_s": _compared(cpu_s)}


def _compared(seconds: dict[str, list[float]]) -> dict[str, Spread]:
    of_ratio = spread(ratios(*(seconds[name] for name in LAUNCHERS)))
    return {**{name: spread(each) for name, each in seconds.items()}, "ratio": of_ratio}


def time_start(launcher: str, ranks: int, timeout_s: float, backend: str = "gloo") -> Start:
    """Start the job: seconds until its first all-reduce, CPU seconds of all its processes.

    Raises:
        BenchJobFailed: it did not succeed within `timeout_s`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    if launcher == "mpiddp":
        command = launch_command("-H", f"localhost:{ranks}", "--timeout", f"{timeout_s:.0f}")
    finished = time_command([*command, SCRIPT, backend], timeout_s=timeout_s)
    (at,) = re.findall(rf"of {ranks} ranks at ([\d.]+)", "\n".join(finished.lines))
    return {"wall_s": float(at) - finished.started_at, "cpu_s": finished.cpu_s}


def table(results: Results) -> str:
    head = ("ranks", "launcher", "wall s", "of torchrun's", "CPU s", "of torchrun's")
    rows = []
    for point in results["points"]:
        for launcher in LAUNCHERS:
            cells = [str(point["ranks"]), launcher]
            for found in (point["wall_s"], point["cpu_s"]):
                ratio = found["ratio"]["median"] if launcher == "mpiddp" else 1.0
                cells += [shown(found[launcher], ".2f"), f"{ratio:.2f}"]
            rows.append(cells)
    return f"Time from the command to the end of the first all-reduce\n\n{aligned(head, rows)}"
