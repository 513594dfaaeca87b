"""`mpiddp bench scaling`: images/s and efficiency by number of ranks.

Weak scaling keeps the batch of each rank, so twice the ranks ideally process twice the images. `--strong`
keeps the global batch. Each number of ranks is a separate job; the jobs alternate in every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import Jobs, progress
from mpiddp.bench.options import add_rounds, as_arguments, counts, parse_rank_options, picked
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.bench.result_lines import Result
from mpiddp.bench.rounds import ratios, turns
from mpiddp.errors import UserError
from mpiddp.text import counted, percentile
from mpiddp.train.options import parse as parse_training


@dataclass(frozen=True)
class RankOptions:
    steps: int
    warmup: int


@dataclass(frozen=True)
class Options(RankOptions):
    ranks: tuple[int, ...] | None
    strong: bool
    rounds: int


def rank_options(argv: list[str]) -> tuple[RankOptions, list[str]]:
    return parse_rank_options("mpiddp bench-rank scaling", RankOptions, _add_steps, argv)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=whole(1), default=20, metavar="K", help="steps to time in each job"
    )
    parser.add_argument(
        "--warmup", type=whole(0), default=5, metavar="K", help="steps before the timed ones"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=counts(1),
        metavar="1,2,4",
        help="numbers of ranks (default: powers of two, and all slots)",
    )
    parser.add_argument(
        "--strong",
        action="store_true",
        help="strong scaling: keep --global-batch-size instead of --batch-size",
    )
    add_rounds(parser, default=3)
    _add_steps(parser)


def measure(options: Options, jobs: Jobs) -> Results:
    sizes = _sizes(options, jobs)
    arguments = as_arguments(picked(RankOptions, options))
    runs: dict[int, list[Result]] = {ranks: [] for ranks in sizes}
    for number, ranks in turns(sizes, options.rounds):
        [run] = jobs.run("scaling", *arguments, ranks=ranks).results
        run["images_per_s"] = run["global_batch_size"] * options.steps / run["total_s"]
        runs[ranks].append(run)
        speed = f"{run['images_per_s']:,.0f} images/s"
        progress("scaling", ranks, number, options.rounds, speed)
    first, last = runs[sizes[0]], runs[sizes[-1]][-1]
    return {
        "strong": options.strong,
        "settings": last.pop("settings"),
        "hosts": last.pop("hosts"),
        "points": [_point(ranks, runs[ranks], sizes[0], first) for ranks in sizes],
    }


def _point(ranks: int, runs: list[Result], base_ranks: int, base: list[Result]) -> Results:
    """The figures of one number of ranks.

    Efficiency is the speed per rank divided by the speed per rank of the smallest job in the same round.
    """
    speeds = [run["images_per_s"] for run in runs]
    bases = [run["images_per_s"] / base_ranks for run in base]
    return {
        "ranks": ranks,
        "num_hosts": runs[0]["num_hosts"],
        "global_batch_size": runs[0]["global_batch_size"],
        "images_per_s": spread(speeds),
        "ideal_images_per_s": spread(bases)["median"] * ranks,
        "efficiency": spread(ratios([speed / ranks for speed in speeds], bases)),
        "step_s": [run["step_s"] for run in runs],
    }


def _sizes(options: Options, jobs: Jobs) -> Sequence[int]:
    """The numbers of ranks to measure, in ascending order."""
    slots = jobs.slots
    sizes = options.ranks or [
        *(2**power for power in range(slots.bit_length()) if 2**power < slots),
        slots,
    ]
    if sizes[-1] > slots:
        raise UserError(f"--ranks {sizes[-1]} is more than the {slots} available slots.")
    batch = parse_training(list(jobs.training)).global_batch_size
    if options.strong and batch is None:
        raise UserError("--strong needs a global batch size. Example: --global-batch-size 512")
    if not options.strong and batch is not None:
        raise UserError(
            "--global-batch-size applies to --strong only. Use --batch-size for weak scaling."
        )
    return sizes


def table(results: Results) -> str:
    rows = []
    for point in results["points"]:
        times = [each for run in point["step_s"] for each in run]
        rows.append(
            [
                str(point["ranks"]),
                str(point["num_hosts"]),
                str(point["global_batch_size"]),
                shown(point["images_per_s"], ",.0f"),
                shown(point["efficiency"], ".3f"),
                f"{1000 * percentile(times, 50):.1f}",
                f"{1000 * percentile(times, 95):.1f}",
            ]
        )
    head = ("ranks", "hosts", "global batch", "images/s", "efficiency", "step p50 ms", "p95 ms")
    return f"{_title(results)}\n\n{aligned(head, rows)}"


def _title(results: Results) -> str:
    settings = results["settings"]
    kept = (
        f"global batch {settings['global_batch_size']}"
        if results["strong"]
        else f"{settings['batch_size']} images per rank"
    )
    kind = "Strong" if results["strong"] else "Weak"
    return (
        f"{kind} scaling: {settings['arch']} on synthetic {settings['dataset']}, {kept}, "
        f"amp {settings['amp']}, {settings['backend']}"
    )


def chart(results: Results) -> Chart:
    points = {f"{p['ranks']}\n{counted(p['num_hosts'], 'host')}": p for p in results["points"]}
    series = {
        "reached": {name: point["images_per_s"] for name, point in points.items()},
        "without loss": {
            name: spread([point["ideal_images_per_s"]]) for name, point in points.items()
        },
    }
    return Chart(_title(results), [Panel("images/s over all ranks", "ranks", series, "bars")])


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    chart,
    size=(7.5, 4.8),
    takes_training=True,
    example="-H localhost:2 --arch resnet18",
)
