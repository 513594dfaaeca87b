"""Measure what `mpiddp train --check-divergence` costs: the figures of docs/evidence/performance.md.

    python -m benchmarks.divergence -H localhost:2 --arch resnet18 --stem imagenet

Blocks of steps alternate with blocks of checks, in one job. A check compares the parameters and the momentum
of all ranks; its time is that of the slowest rank. `benchmarks.ranks.divergence` runs in the ranks.
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
from mpiddp.text import counted

EVERY = 100  # steps between two checks


@dataclass(frozen=True)
class Options:
    rounds: int
    steps: int
    checks: int


def rank_options(argv: list[str]) -> tuple[Options, list[str]]:
    return parse_rank_options("benchmarks.ranks.divergence", Options, _add_options, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=5)
    parser.add_argument(
        "--steps", type=whole(1), default=20, metavar="K", help="steps in each round"
    )
    parser.add_argument(
        "--checks", type=whole(1), default=10, metavar="K", help="checks in each round"
    )


def measure(options: Options, jobs: Jobs) -> Results:
    note(f"divergence: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')}")
    job = ("-m", "benchmarks.ranks.divergence", *as_arguments(options), *jobs.training)
    [found] = jobs.run_job(*job, ranks=jobs.slots).results
    return found


def table(results: Results) -> str:
    steps, checks = (
        [sum(block) / len(block) for block in results[name]] for name in ("step_s", "check_s")
    )
    shares = [check / (EVERY * step) for check, step in zip(checks, steps, strict=True)]
    settings = results["settings"]
    head = ("model", "ranks", "tensors", "step ms", "check ms", f"share at N = {EVERY}")
    row = [
        f"{settings['arch']}, {settings['batch_size']} images per rank, {settings['device']}",
        str(results["ranks"]),
        str(results["num_tensors"]),
        f"{1000 * median(steps):.0f}",
        f"{1000 * median(checks):.1f}",
        f"{median(shares):.2%}",
    ]
    return markdown(head, [row])


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    takes_training=True,
    example="-H localhost:2 --arch resnet18 --stem imagenet",
)

if __name__ == "__main__":
    start_benchmark("divergence", "what --check-divergence costs", BENCHMARK)
