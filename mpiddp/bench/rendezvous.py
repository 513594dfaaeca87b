"""`mpiddp bench rendezvous`: the time to join, by number of ranks.

"MPI alone" is the cost of two allgathers and a broadcast, without torch. "With torch" is everything before
a process group: the import, the same rendezvous, and the store that rank 0 serves.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import BenchJobFailed, Jobs, note, progress
from mpiddp.bench.machine import available_bytes
from mpiddp.bench.options import add_rounds, counts, parse_rank_options
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.text import percentile

TORCH_RANK_BYTES = 260e6  # memory of a rank that has imported torch and joined
SERIES = {"MPI alone": (), "with torch": ("--torch",)}


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...]
    no_torch: bool
    rounds: int


@dataclass(frozen=True)
class RankOptions:
    torch: bool
    to: Path


def rank_options(argv: list[str]) -> RankOptions:
    return parse_rank_options("mpiddp bench-rank rendezvous", RankOptions, _add_rank_options, argv)[
        0
    ]


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--to", type=Path)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=counts(2),
        default="2,4,8,16,32,64,128",
        metavar="2,4",
        help="numbers of ranks to start on this machine",
    )
    parser.add_argument("--no-torch", action="store_true", help="measure MPI alone, without torch")
    add_rounds(parser, default=3)


def measure(options: Options, jobs: Jobs) -> Results:
    points = []
    for ranks in options.ranks:
        for name, arguments in SERIES.items():
            if arguments and (options.no_torch or not _fits(ranks)):
                continue
            try:
                points.append(
                    {"series": name, **_point(name, arguments, ranks, options.rounds, jobs)}
                )
            except BenchJobFailed as failure:
                if not points:
                    raise
                note(
                    f"rendezvous, {name}: a job of {ranks} ranks failed and is left out: {failure}"
                )
    return {"points": points}


def _fits(ranks: int) -> bool:
    needed, free = ranks * TORCH_RANK_BYTES / 1e9, available_bytes() / 1e9
    if needed > free:
        note(
            f"rendezvous, with torch: leaving out {ranks} ranks: they need {needed:.0f} GB, "
            f"and {free:.0f} GB are free."
        )
    return needed <= free


def _point(name: str, arguments: tuple[str, ...], ranks: int, rounds: int, jobs: Jobs) -> Results:
    wall, rendezvous, cpu, peak, peak_of_rank_0 = [], [], [], [], []
    job = ("-m", "mpiddp", "bench-rank", "rendezvous", *arguments)
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as folder:
            finished = jobs.run_here(ranks, *job, "--to", folder)
            files = Path(folder).iterdir()
            found = [json.loads(file.read_text()) for file in files]
        assert len(found) == ranks
        last_joined = max(each["joined_at"] for each in found)
        wall.append(last_joined - finished.started_at)
        rendezvous.append(last_joined - max(each["ready_at"] for each in found))
        cpu.append(finished.cpu_s / ranks)
        peak.append(percentile([each["peak_mb"] for each in found], 50))
        peak_of_rank_0 += [each["peak_mb"] for each in found if each["rank"] == 0]
        progress(f"rendezvous, {name}", ranks, number + 1, rounds, f"{wall[-1]:.2f} s")
    return {
        "ranks": ranks,
        "wall_s": spread(wall),
        "rendezvous_s": spread(rendezvous),
        "cpu_s_per_rank": spread(cpu),
        "rank_peak_mb": max(peak),
        "rank_0_peak_mb": max(peak_of_rank_0),
    }


def table(results: Results) -> str:
    times = ("command to all joined, s", "last rank ready to all joined, s", "CPU s per rank")
    head = ("ranks", "series", *times, "MB per rank", "MB of rank 0")
    rows = [
        [
            str(point["ranks"]),
            point["series"],
            shown(point["wall_s"], ".2f"),
            shown(point["rendezvous_s"], ".3f"),
            shown(point["cpu_s_per_rank"], ".3f"),
            f"{point['rank_peak_mb']:.0f}",
            f"{point['rank_0_peak_mb']:.0f}",
        ]
        for point in results["points"]
    ]
    return f"Rendezvous by number of ranks, all on this machine\n\n{aligned(head, rows)}"


def chart(results: Results) -> Chart:
    panels = [
        Panel(
            label,
            "ranks",
            {
                series: {
                    point["ranks"]: point[name]
                    for point in results["points"]
                    if point["series"] == series
                }
                for series in SERIES
            },
        )
        for name, label in (
            ("wall_s", "command to all ranks joined, s"),
            ("rendezvous_s", "last rank ready to all ranks joined, s"),
            ("cpu_s_per_rank", "CPU time of each rank, s"),
        )
    ]
    return Chart("Rendezvous: medians, lowest to highest", panels)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    chart,
    size=(12, 4.5),
    takes_hosts=False,
    example="--ranks 2,8,32 --no-torch",
)
