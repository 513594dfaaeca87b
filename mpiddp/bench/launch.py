"""`mpiddp bench launch`: from the command to the end of the first all-reduce, beside torchrun.

One env:// script, this machine, both launchers in turn within every round; the first round only warms
the page cache. CPU time counts every process of the job. Memory is what the resident process, the
launcher or torchrun's agent, had held at most when the all-reduce was done.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.bench import charts
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Finished, JobFailed, Jobs, OnLine, progress, run, say
from mpiddp.bench.machine import children, peak_bytes
from mpiddp.bench.options import add_rounds, counts
from mpiddp.bench.report import aligned, shown, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# No ranks shall be left out where they are more than the GPUs.
JOB = (str(Path(__file__).with_name("ranks") / "first_all_reduce.py"), "--backend", "gloo")
LAUNCHERS = ("mpiddp", "torchrun")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=counts(1), default="2,4,8,16,32", metavar="2,4", help="on this machine"
    )
    add_rounds(parser, default=5)


def measure(options: argparse.Namespace, jobs: Jobs) -> Results:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it, for both
    points = []
    for ranks in options.ranks:
        try:
            points.append(_point(ranks, options.rounds, jobs))
        except JobFailed as failure:
            if not points:
                raise
            say(f"launch: left out, for a job of {ranks} ranks failed: {failure}")
    return {"points": points}


def _point(ranks: int, rounds: int, jobs: Jobs) -> dict[str, Any]:
    starts: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for number in range(rounds + 1):
        for launcher in LAUNCHERS if number % 2 else reversed(LAUNCHERS):
            start = _start(launcher, ranks, jobs)
            if number > 0:
                starts[launcher].append(start)
                progress(f"launch, {launcher}", ranks, number, rounds, f"{start['wall_s']:.2f} s")
    ours, theirs = (starts[launcher] for launcher in LAUNCHERS)
    return {
        "ranks": ranks,
        **{
            launcher: {
                "wall_s": spread([start["wall_s"] for start in starts[launcher]]),
                "cpu_s": spread([start["cpu_s"] for start in starts[launcher]]),
                "resident_mb": max(start["resident_mb"] for start in starts[launcher]),
                "children_mb": max(start["children_mb"] for start in starts[launcher]),
            }
            for launcher in LAUNCHERS
        },
        **{
            f"{name}_ratio": spread([a[name] / b[name] for a, b in zip(ours, theirs, strict=True)])
            for name in ("wall_s", "cpu_s")
        },
    }


def _start(launcher: str, ranks: int, jobs: Jobs) -> dict[str, float]:
    """One job: seconds to its first all-reduce, CPU seconds of all of it, and its peak memory in MB."""
    found: dict[str, float] = {}

    def watch(pid: int, line: str) -> None:
        if match := re.search(r"(\d+) ranks at ([\d.]+)", line):
            assert int(match[1]) == ranks
            own = [peak_bytes(child) for child in children(pid)] if launcher == "mpiddp" else []
            found.update(
                at=float(match[2]), resident_mb=peak_bytes(pid) / 1e6, children_mb=sum(own) / 1e6
            )

    finished = _run(launcher, ranks, jobs, watch)
    return {
        "wall_s": found["at"] - finished.started_at,
        "cpu_s": finished.cpu_s,
        "resident_mb": found["resident_mb"],
        "children_mb": found["children_mb"],  # mpirun itself; torchrun's children are the ranks
    }


def _run(launcher: str, ranks: int, jobs: Jobs, watch: OnLine) -> Finished:
    if launcher == "mpiddp":
        return jobs.run_here(ranks, *JOB, on_line=watch)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return run([*torchrun, *JOB], timeout_s=jobs.timeout_s, on_line=watch)


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
                    f"{each['children_mb']:.1f}" if is_ours else "-",
                ]
            )
    return (
        "From the command to the end of the first all-reduce; MB is the launcher's or the agent's "
        f"peak\n\n{aligned(head, rows)}"
    )


def draw(results: Results, figure: Figure) -> None:
    points = results["points"]
    groups = [str(point["ranks"]) for point in points]
    wall, cpu, memory = charts.axes(figure, columns=3)
    for on, name, label in (
        (wall, "wall_s", "command to first all-reduce, s"),
        (cpu, "cpu_s", "CPU time of the whole job, s"),
    ):
        series = {each: [point[each][name] for point in points] for each in LAUNCHERS}
        charts.bars(on, groups, series, label)
        ratios = [point[f"{name}_ratio"]["median"] for point in points]
        for place, (point, ratio) in enumerate(zip(points, ratios, strict=True)):
            top = point["mpiddp"][name]["high"]
            on.annotate(
                f"{ratio:.2f}×",
                (place - 0.2, top),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    resident = {
        "launcher": [spread([point["mpiddp"]["resident_mb"]]) for point in points],
        "torchrun's agent": [spread([point["torchrun"]["resident_mb"]]) for point in points],
        "mpirun": [spread([point["mpiddp"]["children_mb"]]) for point in points],
    }
    charts.bars(memory, groups, resident, "peak memory of what stays resident, MB")
    for on in (wall, cpu, memory):
        on.set_xlabel("ranks")
        charts.legend_above(on)
    figure.suptitle("mpiddp launch beside torchrun: medians, lowest to highest", fontsize=10)


BENCHMARK = Benchmark(_add_options, measure, table, draw, size=(12, 4.5), takes_hosts=False)
