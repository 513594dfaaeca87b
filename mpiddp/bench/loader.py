"""`mpiddp bench loader`: images/s of each data source alone, without a model.

Synthetic images, CIFAR-10 and Fashion-MNIST where they are, and a folder of JPEGs that is made on the
spot, or the one that `--dataset image-folder --data-dir DIR` names.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpiddp.bench import charts
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, say
from mpiddp.bench.options import add_rounds, counts, whole
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.errors import OneSentenceParser, UserError
from mpiddp.train.config import parse as parse_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rank_options() -> argparse.ArgumentParser:
    """The options of the ranks; what else they get is for the training."""
    parser = OneSentenceParser(prog="mpiddp bench-rank loader", allow_abbrev=False)
    _add_options(parser)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=counts(0), default="0,2,4", metavar="0,2,4", help="of the image folder"
    )
    parser.add_argument("--images", type=whole(4), default=512, help="in the folder that is made")
    parser.add_argument("--batches", type=whole(2), default=32, help="in each pass, on each rank")
    add_rounds(parser, default=3)


def measure(options: argparse.Namespace, jobs: Jobs) -> Results:
    if parse_training(options.training).use_syn:
        raise UserError("mpiddp bench loader measures synthetic images anyway: no --use-syn.")
    workers = ",".join(map(str, options.workers))
    arguments = ["--workers", workers, "--images", str(options.images)]
    arguments += ["--batches", str(options.batches), "--rounds", str(options.rounds)]
    say(f"loader: {jobs.slots} ranks, {options.rounds} passes over each source")
    [found] = jobs.run("loader", *arguments, *options.training, ranks=jobs.slots).found
    for name, reason in found["missing"].items():
        say(f"loader: without {name}: {reason}")
    sources = [
        {**source, "images_per_s": spread(source["images_per_s"])} for source in found["sources"]
    ]
    return {
        "ranks": jobs.slots,
        "sources": sources,
        "missing": found["missing"],
        "hosts": found["hosts"],
    }


def table(results: Results) -> str:
    head = ("source", "batch", "images/s over all ranks")
    rows = [
        [source["source"], str(source["batch_size"]), shown(source["images_per_s"], ",.0f")]
        for source in results["sources"]
    ]
    return f"{_title(results)}\n\n{aligned(head, rows)}"


def _title(results: Results) -> str:
    return f"Data sources alone, {results['ranks']} rank{'s' * (results['ranks'] != 1)}"


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
    on.set_xscale("log")
    on.set_ylim(len(names) - 0.5, -0.6)
    on.set_xmargin(0.1)
    on.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    on.set_xlabel("images/s over all ranks (logarithmic; medians, lowest to highest)")
    figure.suptitle(_title(results), fontsize=10)


BENCHMARK = Benchmark(_add_options, measure, table, draw, size=(8, 4.8), takes_training=True)
