"""`mpiddp bench loader`: images/s of each data source alone, beside what the model takes.

Synthetic images, CIFAR-10 and Fashion-MNIST where they are, and a folder of JPEGs that is made on the
spot, or the one that `--dataset image-folder --data-dir DIR` names.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.arguments import whole
from mpiddp.bench import charts
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, counts, parse_rank_options
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.errors import UserError
from mpiddp.text import counted
from mpiddp.train.options import parse as parse_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...]
    images: int
    batches: int
    rounds: int


def rank_options(argv: list[str]) -> tuple[Options, list[str]]:
    return parse_rank_options("mpiddp bench-rank loader", Options, _add_options, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=counts(0), default="0,2,4", metavar="0,2,4", help="processes that decode"
    )
    parser.add_argument("--images", type=whole(4), default=512, metavar="K", help="to generate")
    parser.add_argument("--batches", type=whole(2), default=32, metavar="K", help="a pass and rank")
    add_rounds(parser, default=3)


def measure(options: Options, jobs: Jobs) -> Results:
    if parse_training(list(jobs.training)).use_syn:
        raise UserError("mpiddp bench loader measures synthetic images anyway: no --use-syn.")
    note(
        f"loader: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')} of every source"
    )
    [found] = jobs.run("loader", *as_arguments(options), ranks=jobs.slots).results
    for name, reason in found["missing"].items():
        note(f"loader: without {name}: {reason}")
    return {
        "ranks": jobs.slots,
        "arch": found["arch"],
        "sources": [_beside_the_model(source) for source in found["sources"]],
        "missing": found["missing"],
        "hosts": found["hosts"],
    }


def _beside_the_model(source: Results) -> Results:
    """A model that takes more than the source delivers would wait for it."""
    speed = spread(source["images_per_s"])
    times = speed["median"] / source["model_images_per_s"]
    return {**source, "images_per_s": speed, "times_model": times}


def table(results: Results) -> str:
    head = ("source", "batch", "images/s over all ranks", f"{results['arch']} takes", "times that")
    rows = [
        [
            source["source"],
            str(source["batch_size"]),
            shown(source["images_per_s"], ",.0f"),
            f"{source['model_images_per_s']:,.0f}",
            f"{source['times_model']:,.1f}",
        ]
        for source in results["sources"]
    ]
    return f"{_title(results)}\n\n{aligned(head, rows)}"


def _title(results: Results) -> str:
    ranks = counted(results["ranks"], "rank")
    return f"Data sources alone, {ranks}, and what {results['arch']} takes of them"


def draw(results: Results, figure: Figure) -> None:
    [on] = charts.axes(figure)
    names = [source["source"] for source in results["sources"]]
    speeds = [source["images_per_s"] for source in results["sources"]]
    medians = [speed["median"] for speed in speeds]
    # A decoded photograph is a thousand times the work of a tensor that is there: no bar would show
    # both, and on a logarithmic axis a bar's length means nothing.
    on.errorbar(medians, names, xerr=charts.whiskers(speeds), fmt="o", color=charts.BLUE, capsize=3)
    for name, median in zip(names, medians, strict=True):
        text = f"{median:,.0f}"
        on.annotate(text, (median, name), (0, 7), textcoords="offset points", ha="center")
    takes = [source["model_images_per_s"] for source in results["sources"]]
    on.plot(takes, names, "|", color=charts.ORANGE, markersize=22, markeredgewidth=2)
    on.set_xscale("log")
    on.set_ylim(len(names) - 0.5, -0.6)
    on.set_xmargin(0.1)
    on.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    on.set_xlabel("images/s over all ranks (logarithmic; medians, lowest to highest)")
    figure.suptitle(f"{_title(results)} (bars)", fontsize=10)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    draw,
    takes_training=True,
    example="-H localhost:2 --workers 0,2,4 --arch resnet18",
)
