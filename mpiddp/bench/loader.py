"""`mpiddp bench loader`: images/s of each data source, compared with the speed of the model.

The sources are synthetic images, CIFAR-10 and Fashion-MNIST if they are present, and a generated folder
of JPEGs or the one that `--dataset image-folder --data-dir DIR` names.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, counts, parse_rank_options
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.errors import UserError
from mpiddp.text import counted
from mpiddp.train.options import parse as parse_training


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
        "--workers",
        type=counts(0),
        default="0,2,4",
        metavar="0,2,4",
        help="numbers of workers for the image folder",
    )
    parser.add_argument(
        "--images", type=whole(4), default=512, metavar="K", help="images in the generated folder"
    )
    parser.add_argument(
        "--batches", type=whole(2), default=32, metavar="K", help="batches per pass and rank"
    )
    add_rounds(parser, default=3)


def measure(options: Options, jobs: Jobs) -> Results:
    if parse_training(list(jobs.training)).use_syn:
        raise UserError(
            "mpiddp bench loader always measures synthetic images. Leave out --use-syn."
        )
    note(f"loader: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')} per source")
    [found] = jobs.run("loader", *as_arguments(options), ranks=jobs.slots).results
    for name, reason in found["missing"].items():
        note(f"loader: leaving out {name}: {reason}")
    return {
        "ranks": jobs.slots,
        "arch": found["arch"],
        "sources": [_compared_with_model(source) for source in found["sources"]],
        "missing": found["missing"],
        "hosts": found["hosts"],
    }


def _compared_with_model(source: Results) -> Results:
    """Add the ratio of the source's speed to the model's. Below 1 the model waits for the source."""
    speed = spread(source["images_per_s"])
    times = speed["median"] / source["model_images_per_s"]
    return {**source, "images_per_s": speed, "times_model": times}


def table(results: Results) -> str:
    head = ("source", "batch", "images/s over all ranks", f"{results['arch']} images/s", "ratio")
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
    return f"Data sources, {ranks}, compared with the speed of {results['arch']}"


def chart(results: Results) -> Chart:
    # The speeds of decoding and of ready tensors differ by a factor of a thousand. Bars cannot show both, and
    # the length of a bar has no meaning on a logarithmic axis.
    sources = {source["source"]: source for source in results["sources"]}
    series = {
        "source": {name: source["images_per_s"] for name, source in sources.items()},
        results["arch"]: {
            name: spread([source["model_images_per_s"]]) for name, source in sources.items()
        },
    }
    panel = Panel("images/s over all ranks", "", series, kind="points", logarithmic="y")
    return Chart(_title(results), [panel])


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    chart,
    takes_training=True,
    example="-H localhost:2 --workers 0,2,4 --arch resnet18",
)
