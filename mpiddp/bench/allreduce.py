"""`mpiddp bench allreduce`: the bandwidth of an all-reduce by size, over gloo and over NCCL.

The algorithm bandwidth is size divided by time. The bus bandwidth is that times 2·(n-1)/n, the load of
every link for a sum over n ranks, so it is comparable with the hardware's bandwidth for any n:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass

from mpiddp.arguments import duration, whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import as_arguments, counts, parse_rank_options, size_bytes
from mpiddp.bench.report import Spread, aligned, size_name, spread
from mpiddp.errors import UserError
from mpiddp.text import percentile

MIN_BYTES = 1024
STEP = 4  # the factor from one size to the next


@dataclass(frozen=True)
class Options:
    backend: str | None
    max_size: int
    seconds: float
    repeats: int


@dataclass(frozen=True)
class RankOptions:
    sizes: tuple[int, ...]
    seconds: float
    repeats: int
    backend: str | None


def rank_options(argv: list[str]) -> RankOptions:
    return parse_rank_options("mpiddp bench-rank allreduce", RankOptions, _add_rank_options, argv)[
        0
    ]


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=counts(1))
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--backend")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="communication backend (default: gloo, and nccl if there are GPUs)",
    )
    parser.add_argument(
        "--max-size",
        type=size_bytes,
        default="1G",
        metavar="64M",
        help="largest message size (at least 1K)",
    )
    parser.add_argument(
        "--seconds",
        type=duration,
        default=1.0,
        metavar="S",
        help="time to spend on each size, roughly",
    )
    parser.add_argument(
        "--repeats",
        type=whole(1),
        default=5,
        metavar="R",
        help="minimum number of repeats per size",
    )


def measure(options: Options, jobs: Jobs) -> Results:
    ranks = jobs.slots
    if ranks < 2:
        raise UserError("an all-reduce needs at least 2 ranks. Example: -H localhost:2")
    sizes = [MIN_BYTES]
    while sizes[-1] * STEP <= options.max_size:
        sizes.append(sizes[-1] * STEP)
    note(f"allreduce: {ranks} ranks, {size_name(sizes[0])} to {size_name(sizes[-1])}")
    rank_arguments = as_arguments(
        RankOptions(tuple(sizes), options.seconds, options.repeats, options.backend)
    )
    [found] = jobs.run("allreduce", *rank_arguments, ranks=ranks).results
    bus_factor = 2 * (ranks - 1) / ranks
    points = []
    for each in found["sums"]:
        speeds = sorted(each["bytes"] / taken / 1e9 for taken in each["seconds"])
        middle, low, high = (percentile(speeds, percent) for percent in (50, 10, 90))
        points.append(
            {
                "backend": each["backend"],
                "bytes": each["bytes"],
                "count": len(speeds),
                "time_s": percentile(each["seconds"], 50),
                "algorithm_gb_per_s": {"median": middle, "low": low, "high": high},
                "bus_gb_per_s": {
                    "median": middle * bus_factor,
                    "low": low * bus_factor,
                    "high": high * bus_factor,
                },
            }
        )
    return {"ranks": ranks, "points": points, "hosts": found["hosts"]}


def table(results: Results) -> str:
    head = ("backend", "size", "times", "ms", "algorithm GB/s", "bus GB/s", "p10", "p90")
    rows = [
        [
            point["backend"],
            size_name(point["bytes"]),
            str(point["count"]),
            f"{1000 * point['time_s']:.3f}",
            f"{point['algorithm_gb_per_s']['median']:.3f}",
            *(f"{point['bus_gb_per_s'][name]:.3f}" for name in ("median", "low", "high")),
        ]
        for point in results["points"]
    ]
    return f"{_title(results)}\n\n{aligned(head, rows)}"


def _title(results: Results) -> str:
    return f"All-reduce over {results['ranks']} ranks, fp32, time of the slowest rank"


def chart(results: Results) -> Chart:
    times: dict[str, dict[int, Spread]] = defaultdict(dict)
    bandwidths: dict[str, dict[int, Spread]] = defaultdict(dict)
    for point in results["points"]:
        times[point["backend"]][point["bytes"]] = spread([1e6 * point["time_s"]])
        bandwidths[point["backend"]][point["bytes"]] = point["bus_gb_per_s"]
    panels = (
        Panel("median time, µs", "size", times, logarithmic="xy", tick=size_name),
        Panel(
            "bus bandwidth, GB/s (median, p10 to p90)",
            "size",
            bandwidths,
            logarithmic="x",
            tick=size_name,
        ),
    )
    return Chart(_title(results), panels)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    chart,
    size=(10, 4.8),
    example="-H localhost:2 --max-size 64M",
)
