"""The time from the command to the end of the first all-reduce, beside torchrun.

    python -m benchmarks.start --ranks 2,4,8

Both launchers start the same env:// script on this machine over gloo, in turn within every round. CPU time
counts every process of the job. A job that fails is counted, and its error printed.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypedDict

from benchmarks.harness import option, progress, run_script, turns, wholes
from mpiddp.arguments import whole
from mpiddp.bench.measured_jobs import (
    BenchJobFailed,
    Jobs,
    aligned,
    launch_command,
    output_of,
    spread,
)

SCRIPT = str(Path(__file__).with_name("ranks") / "all_reduces.py")
LAUNCHERS = ("mpiddp", "torchrun")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = option("numbers of ranks", parse=wholes(1), default="2,4,8")
    rounds: int = option("rounds of both launchers", parse=whole(1), default=5)
    variable: bool = option("the script sets a variable before torch", value="", default=False)
    on: str | None = option("start mpiddp alone, on these hosts", value="HOSTS")


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
    job = ("gloo", *["variable"] * options.variable)
    for ranks in options.ranks:
        where = ("-H", options.on or f"localhost:{ranks}")
        commands = {
            name: start_command(name, where, ranks, jobs.timeout_s, job=job)
            for name in (LAUNCHERS[:1] if options.on else LAUNCHERS)
        }
        starts += in_turn("start", commands, ranks, options.rounds, jobs.timeout_s)
    return {"starts": starts}


def start_command(
    launcher: str,
    where: Sequence[str],
    ranks: int,
    timeout_s: float,
    options: Sequence[str] = (),
    job: Sequence[str] = ("gloo",),
) -> list[str]:
    """Start the script with the arguments `job`. torchrun starts ranks on this machine only."""
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    else:
        command = launch_command(*where, "-n", str(ranks), "--timeout", f"{timeout_s:.0f}")
    return [*command, *options, SCRIPT, *job]


def in_turn(
    name: str, commands: Mapping[str, Sequence[str]], ranks: int, rounds: int, timeout_s: float
) -> list[Timed]:
    """Let the launchers run their commands in turn."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a changed package would be compiled each time
    starts = [
        Timed(launcher=launcher, ranks=ranks, wall_s=[], cpu_s=[], failed=0)
        for launcher in commands
    ]
    for command in (
        commands.values() if rounds > 1 else ()
    ):  # the first start only warms the page cache
        with contextlib.suppress(BenchJobFailed):
            time_start(command, timeout_s)
    for number, timed in turns(starts, rounds):
        try:
            wall_s, cpu_s = time_start(commands[timed["launcher"]], timeout_s)
            timed["wall_s"].append(wall_s)
            timed["cpu_s"].append(cpu_s)
            measured = f"{wall_s:.2f} s"
        except BenchJobFailed as failure:
            timed["failed"] += 1
            measured = f"failed: {failure}"
        progress(f"{name}, {timed['launcher']}", ranks, number, rounds, measured)
    return starts


def time_start(command: Sequence[str], timeout_s: float) -> tuple[float, float]:
    """The seconds from the command, or from the kill, to the first all-reduce, or step, after it; and CPU seconds.

    Raises:
        BenchJobFailed: the job did not succeed within `timeout_s`.
    """
    before, started_at = _cpu_s(), time.time()
    printed = "\n".join(output_of(command, timeout_s=timeout_s))
    times = re.findall(r"(?:ranks|killed) at ([\d.]+)", printed)
    *_, since, until = started_at, *map(float, times)
    return until - since, _cpu_s() - before


def _cpu_s() -> float:
    """The CPU seconds, of users and of the system, of all ended children and their descendants."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def table(results: Results) -> str:
    title = "Time from the command to the end of the first all-reduce"
    return f"{title}\n\n{compared(results['starts'])}"


def compared(starts: Sequence[Timed]) -> str:
    """A row for each launcher with each number of ranks. Ratios are those of the medians."""
    torchruns = {timed["ranks"]: timed for timed in starts if timed["launcher"] == "torchrun"}
    rows = []
    for timed in starts:
        torchrun, done = torchruns.get(timed["ranks"]), len(timed["wall_s"])
        rows.append(
            [
                *(str(timed["ranks"]), timed["launcher"]),
                *_cells(timed["wall_s"], torchrun["wall_s"] if torchrun else []),
                *_cells(timed["cpu_s"], torchrun["cpu_s"] if torchrun else []),
                f"{done} of {done + timed['failed']}",
            ]
        )
    head = ("ranks", "launcher", "wall s", "of torchrun's", "CPU s", "of torchrun's", "succeeded")
    return aligned(head, rows)


def _cells(seconds: list[float], of_torchrun: list[float]) -> tuple[str, str]:
    has_both = seconds and of_torchrun
    ratio = f"{median(seconds) / median(of_torchrun):.2f}" if has_both else "-"
    return spread(seconds, ".2f") if seconds else "-", ratio


if __name__ == "__main__":
    sys.exit(
        run_script(
            "start",
            "the time from the command to the first all-reduce, beside torchrun",
            takes_hosts=False,
        )
    )
