"""`mpiddp bench launch`: the time from the command to the end of the first all-reduce, beside torchrun.

Both launchers start the same env:// script on this machine, in turn within every round. The first round
only warms the page cache. CPU time counts every process of the job. Memory is the peak memory of the
resident process, the launcher or torchrun's agent, at the end of the all-reduce. `--cold` measures the
first start after a reboot: Python, torch and the other packages come from the disk each time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import BenchJobFailed, Jobs, note, progress, run
from mpiddp.bench.machine import first_child, forget_files, peak_bytes
from mpiddp.bench.options import add_rounds, counts
from mpiddp.bench.report import Spread, aligned, shown, spread
from mpiddp.bench.rounds import ratios, turns

SCRIPT = str(Path(__file__).with_name("ranks") / "first_all_reduce.py")
JOB = (SCRIPT, "gloo")  # with which there may be more ranks than GPUs
LAUNCHERS = ("mpiddp", "torchrun")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...]
    rounds: int
    cold: bool


@dataclass(frozen=True)
class Start:
    """One job: seconds to its first all-reduce, CPU seconds of all its processes, peak memory in MB.

    `resident_mb` is the memory of the command itself, `child_mb` that of its first child, which is mpirun.
    """

    wall_s: float
    cpu_s: float
    resident_mb: float
    child_mb: float


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=counts(1),
        default="2,4,8,16,32",
        metavar="2,4",
        help="numbers of ranks to start on this machine",
    )
    add_rounds(parser, default=5)
    parser.add_argument(
        "--cold", action="store_true", help="read all files from the disk, as after a reboot"
    )


def measure(options: Options, jobs: Jobs) -> Results:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    points = []
    for ranks in options.ranks:
        try:
            points.append(_point(ranks, options, jobs))
        except BenchJobFailed as failure:
            if not points:
                raise
            note(f"launch: a job of {ranks} ranks failed and is left out: {failure}")
    return {"points": points}


def _point(ranks: int, options: Options, jobs: Jobs) -> Results:
    starts: dict[str, list[Start]] = {launcher: [] for launcher in LAUNCHERS}
    rounds = options.rounds
    for number, launcher in turns(LAUNCHERS, rounds, warmup=1):
        if options.cold:
            forget_files(sys.prefix, sys.base_prefix)
        start = _start(launcher, ranks, jobs)
        if number > 0:
            starts[launcher].append(start)
            progress(f"launch, {launcher}", ranks, number, rounds, f"{start.wall_s:.2f} s")
    wall_s = {each: [start.wall_s for start in starts[each]] for each in LAUNCHERS}
    cpu_s = {each: [start.cpu_s for start in starts[each]] for each in LAUNCHERS}
    return {
        "ranks": ranks,
        **{
            launcher: {
                "wall_s": spread(wall_s[launcher]),
                "cpu_s": spread(cpu_s[launcher]),
                "resident_mb": max(start.resident_mb for start in starts[launcher]),
                # mpirun's own memory; the children of torchrun are the ranks.
                "child_mb": max(start.child_mb for start in starts[launcher])
                if launcher == "mpiddp"
                else 0.0,
            }
            for launcher in LAUNCHERS
        },
        "wall_s_ratio": spread(ratios(wall_s["mpiddp"], wall_s["torchrun"])),
        "cpu_s_ratio": spread(ratios(cpu_s["mpiddp"], cpu_s["torchrun"])),
    }


def _start(launcher: str, ranks: int, jobs: Jobs) -> Start:
    command = jobs.command_here(ranks, *JOB) if launcher == "mpiddp" else torchrun(ranks)
    return time_start(command, ranks, jobs.timeout_s)


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *JOB]


def time_start(command: Sequence[str], ranks: int, timeout_s: float) -> Start:
    """Run a command that starts JOB. The job's rank 0 prints a line after its first all-reduce.

    Raises:
        BenchJobFailed: it did not succeed within `timeout_s`.
    """
    seen: list[tuple[float, int, int]] = []

    def watch(pid: int, line: str) -> None:
        if match := re.search(r"(\d+) ranks at ([\d.]+)", line):
            assert int(match[1]) == ranks
            # Its later children are those of ranks, which it adopts.
            of_child = peak_bytes(first_child(pid))
            seen.append((float(match[2]), peak_bytes(pid), of_child))

    finished = run(command, timeout_s=timeout_s, on_line=watch)
    [(at, own, of_child)] = seen
    return Start(at - finished.started_at, finished.cpu_s, own / 1e6, of_child / 1e6)


def table(results: Results) -> str:
    head = (
        "ranks",
        "launcher",
        "wall s",
        "of torchrun's",
        "CPU s",
        "of torchrun's",
        "MB",
        "mpirun",
    )
    rows = []
    for point in results["points"]:
        for launcher in LAUNCHERS:
            each = point[launcher]
            is_ours = launcher == "mpiddp"
            rows.append(
                [
                    str(point["ranks"]),
                    launcher,
                    shown(each["wall_s"], ".2f"),
                    f"{point['wall_s_ratio']['median']:.2f}" if is_ours else "1.00",
                    shown(each["cpu_s"], ".2f"),
                    f"{point['cpu_s_ratio']['median']:.2f}" if is_ours else "1.00",
                    f"{each['resident_mb']:.1f}",
                    f"{each['child_mb']:.1f}" if is_ours else "-",
                ]
            )
    return (
        "Time from the command to the end of the first all-reduce; MB is the peak memory of the "
        f"launcher or torchrun's agent\n\n{aligned(head, rows)}"
    )


def chart(results: Results) -> Chart:
    points = {point["ranks"]: point for point in results["points"]}

    def of_both(name: str) -> dict[str, dict[int, Spread]]:
        return {
            launcher: {ranks: point[launcher][name] for ranks, point in points.items()}
            for launcher in LAUNCHERS
        }

    resident = {
        name: {ranks: spread([point[launcher][part]]) for ranks, point in points.items()}
        for name, launcher, part in (
            ("launcher", "mpiddp", "resident_mb"),
            ("torchrun's agent", "torchrun", "resident_mb"),
            ("mpirun", "mpiddp", "child_mb"),
        )
    }
    panels = (
        Panel("command to first all-reduce, s", "ranks", of_both("wall_s"), "bars"),
        Panel("CPU time of the whole job, s", "ranks", of_both("cpu_s"), "bars"),
        Panel("peak memory of the resident processes, MB", "ranks", resident, "bars"),
    )
    return Chart("mpiddp launch and torchrun: medians, lowest to highest", panels)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    chart,
    size=(12, 4.5),
    takes_hosts=False,
    example="--ranks 2,4 --rounds 3",
)
