"""Measure padded, bucketed and packed batches of uneven texts, and print docs/evidence/gpt.md's table.

    python -m benchmarks.batching -H localhost:2
    python -m benchmarks.batching -H localhost:2 --texts entries --longest 2048 --rows 2

The ranks train the GPT of examples/gpt on the same documents in each of the three ways. The ways alternate,
in every round with other documents. "padded again" measures the noise. The straggling of a step is read from
the processor time of each rank's forward and backward pass, which other load on the machine hardly changes.
`benchmarks.ranks.batching` runs in the ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.harness import start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, parse_rank_options
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios
from mpiddp.text import counted

PADDED, AGAIN, BUCKETED, PACKED = "padded", "padded again (noise)", "bucketed", "packed"
VARIANTS = (PADDED, AGAIN, BUCKETED, PACKED)


@dataclass(frozen=True)
class Options:
    rounds: int
    texts: str
    longest: int
    documents: int
    rows: int


def rank_options(argv: list[str]) -> Options:
    return parse_rank_options("benchmarks.ranks.batching", Options, _add_options, argv)[0]


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=6)
    parser.add_argument(
        "--texts",
        default="paragraphs",
        choices=("paragraphs", "entries"),
        help="the documents: paragraphs of Python's help pages, or whole pages",
    )
    parser.add_argument(
        "--longest",
        type=whole(3),
        default=512,
        metavar="K",
        help="characters of a document; the rest of a longer one is left out",
    )
    parser.add_argument(
        "--documents", type=whole(1), default=192, metavar="K", help="documents of a round"
    )
    parser.add_argument(
        "--rows",
        type=whole(1),
        default=8,
        metavar="K",
        help="documents of a rank in a step; packed steps have as many characters",
    )


def measure(options: Options, jobs: Jobs) -> Results:
    note(f"batching: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')}")
    job = ("-m", "benchmarks.ranks.batching", *as_arguments(options))
    [found] = jobs.run_job(*job, ranks=jobs.slots).results
    return found


def table(results: Results) -> str:
    """Medians over the rounds; the ratio of the rates is that of each round to padded."""
    rates = {
        name: [each["targets"] / each["seconds"] for each in blocks]
        for name, blocks in _of(results)
    }
    rows = []
    for name, blocks in _of(results):
        steps = [step for block in blocks for step in block["compute_s"]]
        slower = [max(step) / min(step) for step in steps]
        waited = 1 - sum(map(mean, steps)) / sum(map(max, steps))
        padding = 1 - sum(b["targets"] for b in blocks) / sum(b["positions"] for b in blocks)
        rows.append(
            [
                name,
                f"{median(rates[name]):,.0f}",
                f"{median(ratios(rates[name], rates[PADDED])):.2f}",
                f"{padding:.0%}",
                f"{median(slower):.2f}",
                f"{mean(slower):.2f}",
                f"{waited:.0%}",
            ]
        )
    head = (
        *("batches", "characters/s", "to padded", "padding"),
        *("slowest / fastest rank, median", "mean", "computing time lost"),
    )
    return f"{results['documents']}\n\n{markdown(head, rows)}"


def _of(results: Results) -> list[tuple[str, list[Results]]]:
    return list(results["blocks"].items())


BENCHMARK = Benchmark(Options, _add_options, measure, table, example="-H localhost:2 --rounds 6")

if __name__ == "__main__":
    start_benchmark("batching", "padded, bucketed and packed batches of uneven texts", BENCHMARK)
