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

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, ratios, shown, spread, turns
from mpiddp.bench.jobs import BenchJobFailed, Jobs, launch_command, note, progress, time_command
from mpiddp.bench.options import option, wholes

SCRIPT = str(Path(__file__).with_name("all_reduces.py"))
LAUNCHERS = ("mpiddp", "torchrun")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = option("numbers of ranks", type=wholes(1), default="2,4,8,16,32")
    rounds: int = option("rounds of both launchers", type=whole(1), default=5)


def measure(options: Options, jobs: Jobs) -> Result:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be more ranks than GPUs
    points: list[Result] = []
    for ranks in options.ranks:
        try:
            points.append(_point(ranks, options.rounds, jobs.timeout_s))
        except BenchJobFailed as failure:
            if not points:
                raise
            note(f"start: a job of {ranks} ranks failed and is left out: {failure}")
    return {"points": points}


def _point(ranks: int, rounds: int, timeout_s: float) -> Result:
    starts: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for number, launcher in turns(LAUNCHERS, rounds, warmup=1):
        start = time_start(launcher, ranks, timeout_s)
        if number > 0:
            starts[launcher].append(start)
            progress(f"start, {launcher}", ranks, number, rounds, f"{start['wall_s']:.2f} s")
    found: Result = {"ranks": ranks}
    for name in ("wall_s", "cpu_s"):
        ours, theirs = ([start[name] for start in starts[each]] for each in LAUNCHERS)
        spreads = (spread(ours), spread(theirs), spread(ratios(ours, theirs)))
        found[name] = dict(zip((*LAUNCHERS, "ratio"), spreads, strict=True))
    return found


def time_start(
    launcher: str, ranks: int, timeout_s: float, backend: str = "gloo"
) -> dict[str, float]:
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


def table(results: Result) -> str:
    head = ("ranks", "launcher", "wall s", "of torchrun's", "CPU s", "of torchrun's")
    rows = []
    for point in results["points"]:
        for launcher in LAUNCHERS:
            cells = [str(point["ranks"]), launcher]
            for name in ("wall_s", "cpu_s"):
                ratio = point[name]["ratio"]["median"] if launcher == "mpiddp" else 1.0
                cells += [shown(point[name][launcher], ".2f"), f"{ratio:.2f}"]
            rows.append(cells)
    return f"Time from the command to the end of the first all-reduce\n\n{aligned(head, rows)}"
