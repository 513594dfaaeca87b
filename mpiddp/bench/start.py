"""`mpiddp bench start`: the time from the command to the end of the first all-reduce, beside torchrun.

Both launchers start the same env:// script on this machine over gloo, in turn within every round. The first
round only warms the page cache. CPU time counts every process of the job.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import aligned, option, shown, turns, wholes
from mpiddp.bench.jobs import Jobs, launch_command, progress, time_command

SCRIPT = str(Path(__file__).with_name("all_reduces.py"))
LAUNCHERS = ("mpiddp", "torchrun")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = option("numbers of ranks", type=wholes(1), default="2,4,8")
    rounds: int = option("rounds of both launchers", type=whole(1), default=5)


class Timed(TypedDict):
    """The starts of one launcher, or its restarts: the seconds of those that succeeded."""

    launcher: str
    ranks: int
    wall_s: list[float]
    cpu_s: list[float]  # of all processes of the job on this machine
    failed: int


class Results(TypedDict):
    starts: list[Timed]


def measure(options: Options, jobs: Jobs) -> Results:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be more ranks than GPUs
    starts = list[Timed]()
    for ranks in options.ranks:
        time_one = partial(time_start, ranks=ranks, timeout_s=jobs.timeout_s)
        starts += in_turn("start", LAUNCHERS, ranks, options.rounds, time_one)
    return {"starts": starts}


def in_turn(
    name: str,
    launchers: Sequence[str],
    ranks: int,
    rounds: int,
    time_one: Callable[[str], tuple[float, float] | None],
) -> list[Timed]:
    """Let the launchers take turns. `time_one` gives wall and CPU seconds, None for a failure."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a changed package would be compiled each time
    found = [Timed(launcher=each, ranks=ranks, wall_s=[], cpu_s=[], failed=0) for each in launchers]
    for number, timed in turns(found, rounds, warmup=1):
        taken = time_one(timed["launcher"])
        if number < 1:
            continue
        if taken is None:
            timed["failed"] += 1
        else:
            timed["wall_s"].append(taken[0])
            timed["cpu_s"].append(taken[1])
        measured = f"{taken[0]:.2f} s" if taken else "failed"
        progress(f"{name}, {timed['launcher']}", ranks, number, rounds, measured)
    return found


def time_start(
    launcher: str, ranks: int, timeout_s: float, backend: str = "gloo"
) -> tuple[float, float]:
    """Start the job once.

    Raises:
        BenchJobFailed: it did not succeed within `timeout_s`.
    """
    command = launcher_command(launcher, ("-H", f"localhost:{ranks}"), ranks, timeout_s)
    done = time_command([*command, SCRIPT, backend], timeout_s=timeout_s)
    (at,) = re.findall(rf"of {ranks} ranks at ([\d.]+)", "\n".join(done.lines))
    return float(at) - done.started_at, done.cpu_s


def launcher_command(
    launcher: str, where: Sequence[str], ranks: int, timeout_s: float
) -> list[str]:
    """The command up to the script. torchrun starts ranks on this machine only."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return launch_command(*where, "-n", str(ranks), "--timeout", f"{timeout_s:.0f}")


def table(results: Results) -> str:
    title = "Time from the command to the end of the first all-reduce"
    return f"{title}\n\n{compared(results['starts'])}"


def compared(starts: Sequence[Timed]) -> str:
    """A row for each launcher with each number of ranks. Ratios are those of the medians."""
    torchruns = {each["ranks"]: each for each in starts if each["launcher"] == "torchrun"}
    rows = []
    for own in starts:
        theirs, done = torchruns.get(own["ranks"]), len(own["wall_s"])
        rows.append(
            [
                *(str(own["ranks"]), own["launcher"]),
                *_cells(own["wall_s"], theirs["wall_s"] if theirs else []),
                *_cells(own["cpu_s"], theirs["cpu_s"] if theirs else []),
                f"{done} of {done + own['failed']}",
            ]
        )
    head = ("ranks", "launcher", "wall s", "of torchrun's", "CPU s", "of torchrun's", "succeeded")
    return aligned(head, rows)


def _cells(own: list[float], theirs: list[float]) -> tuple[str, str]:
    ratio = f"{median(own) / median(theirs):.2f}" if own and theirs else "-"
    return shown(own, ".2f") if own else "-", ratio
