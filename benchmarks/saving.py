"""Measures what saving costs the steps, and prints docs/performance.md's and docs/checkpoints.md's tables.

    python -m benchmarks.saving -H localhost:2 --rounds 12 --stem imagenet

Blocks of 20 steps with a save after the first one, in a fresh folder of --folder, alternate with blocks
that do not save; a third kind writes the checkpoint before it goes on, as a plain torch.save would. All
are in one job. A step lasts until the next one begins, and so has the snapshot in it; the last of a block
does not wait for the writer. The rank's side is `benchmarks.ranks.saving`.
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
from mpiddp.train.architectures import ARCHITECTURES

NO_SAVE, IN_THREAD, AT_ONCE = "no save", "in a thread", "at once"
VARIANTS = (NO_SAVE, IN_THREAD, AT_ONCE)


@dataclass(frozen=True)
class Options:
    rounds: int
    arch: str
    stem: str
    image_size: int
    backend: str
    folder: str | None


def rank_options(argv: list[str]) -> Options:
    return parse_rank_options("benchmarks.ranks.saving", Options, _add_options, argv)[0]


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=5)
    parser.add_argument(
        "--arch", default="resnet18", choices=ARCHITECTURES, metavar="NAME", help="a ResNet"
    )
    parser.add_argument(
        "--stem", default="cifar", choices=("cifar", "imagenet"), help="of the ResNet"
    )
    parser.add_argument(
        "--image-size", type=whole(1), default=32, metavar="PIXELS", help="each side"
    )
    parser.add_argument(
        "--backend", default="gloo", choices=("gloo", "nccl"), help="of the gradients"
    )
    parser.add_argument("--folder", metavar="DIR", help="save here (default: the temporary folder)")


def measure(options: Options, jobs: Jobs) -> Results:
    note(f"saving: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')}")
    job = ("-m", "benchmarks.ranks.saving", *as_arguments(options))
    [found] = jobs.run_job(*job, ranks=jobs.slots).results
    return found


def table(results: Results) -> str:
    """Each variant against the block of the same round that does not save: medians over the rounds."""
    seconds: dict[str, list[list[float]]] = results["step_s"]
    plain_means = [mean(block) for block in seconds[NO_SAVE]]
    plain_medians = [median(block) for block in seconds[NO_SAVE]]
    rows = []
    for variant, blocks in seconds.items():
        means = [mean(block) for block in blocks]
        saving = [block[0] for block in blocks]
        rows.append(
            [
                variant,
                f"{median(means) * 1e3:.0f}",
                f"{median(ratios(means, plain_means)):.3f}",
                f"{median(saving) * 1e3:.0f}",
                f"{median(ratios(saving, plain_medians)):.2f}",
                f"{median(results['cpu_s'][variant]):.2f}",
            ]
        )
    times = ("mean step ms", "ratio", "step that saves ms", "ratio")
    return markdown(("variant", *times, "CPU s a block, rank 0"), rows)


BENCHMARK = Benchmark(
    Options, _add_options, measure, table, example="-H localhost:2 --rounds 12 --stem imagenet"
)

if __name__ == "__main__":
    start_benchmark("saving", "what saving costs the steps", BENCHMARK)
