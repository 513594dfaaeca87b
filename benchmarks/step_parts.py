"""Measure how near a step is to the sum of its parts: a table of docs/evidence/performance.md.

    python -m benchmarks.step_parts -H localhost:2 --arch resnet18 --stem imagenet

In one job, blocks alternate: whole steps; steps that send nothing; the all-reduce of their gradients; the
convolutions of a step, forwards and backwards. Each has all ranks at work at the same time.
`benchmarks.ranks.step_parts` runs in the ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, parse_rank_options
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios
from mpiddp.text import counted

STEP, SILENT = "the step", "without communication"
ALL_REDUCE, CONVOLUTIONS = "the all-reduce alone", "the convolutions alone"
PARTS = (STEP, SILENT, ALL_REDUCE, CONVOLUTIONS)


@dataclass(frozen=True)
class Options:
    rounds: int
    steps: int


def rank_options(argv: list[str]) -> tuple[Options, list[str]]:
    return parse_rank_options("benchmarks.ranks.step_parts", Options, _add_options, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=15)
    parser.add_argument(
        "--steps", type=whole(1), default=5, metavar="K", help="steps of each block"
    )


def measure(options: Options, jobs: Jobs) -> Results:
    note(f"parts: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')}")
    job = ("-m", "benchmarks.ranks.step_parts", *as_arguments(options), *jobs.training)
    [found] = jobs.run_job(*job, ranks=jobs.slots).results
    return found


def table(results: Results) -> str:
    """Medians over the rounds. The last column is relative to the whole step of the same round."""
    seconds: dict[str, list[float]] = results["step_s"]
    sums = [sum(both) for both in zip(seconds[SILENT], seconds[ALL_REDUCE], strict=True)]
    shown = {**seconds, f"{SILENT}, and {ALL_REDUCE}": sums}
    rows = [
        [
            name,
            f"{1e3 * median(each):.0f} ({1e3 * min(each):.0f} to {1e3 * max(each):.0f})",
            f"{median(ratios(each, seconds[STEP])):.2f}",
        ]
        for name, each in shown.items()
    ]
    return markdown(("part", "ms", "of the step"), rows)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    takes_training=True,
    example="-H localhost:2 --arch resnet18 --stem imagenet",
)

if __name__ == "__main__":
    start_benchmark("step_parts", "how near a step is to its parts", BENCHMARK)
