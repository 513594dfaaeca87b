"""Measure the time that saves add to the steps, and print the table of docs/evidence/performance.md.

    python -m benchmarks.saving -H localhost:2 --rounds 12 --stem imagenet
    python -m benchmarks.saving -H localhost:2 --rounds 12 --variants thread,torch,dcp --disk-mb-per-s 100

Blocks of steps alternate in one job: without a save; with a save in a thread after the first step; with a
save that completes before the next step; and with the saves of other programs. The
checkpoints are written into a new folder in --folder. A step is timed until the next one begins, so it
includes the snapshot. The last step of a block does not wait for the writing thread.
`benchmarks.ranks.saving` runs in the ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from benchmarks import slow_disk
from benchmarks.harness import start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, parse_rank_options
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios
from mpiddp.text import counted
from mpiddp.train.options import ARCHS

NO_SAVE = "no save"
VARIANTS = {
    "thread": "in a thread",
    "at-once": "at once",
    "torch": "torch.save",
    "lightning": "Lightning",
    "dcp": "async_save of DCP",
}


@dataclass(frozen=True)
class Options:
    rounds: int
    steps: int
    batch_size: int
    arch: str
    stem: str
    image_size: int
    parallel: str
    backend: str
    folder: str | None
    variants: str
    disk_mb_per_s: int | None


def rank_options(argv: list[str]) -> Options:
    return parse_rank_options("benchmarks.ranks.saving", Options, _add_options, argv)[0]


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=5)
    parser.add_argument(
        "--steps", type=whole(2), default=20, metavar="N", help="steps of a block, and so of a save"
    )
    parser.add_argument(
        "--batch-size", type=whole(1), default=64, metavar="N", help="images per rank and step"
    )
    parser.add_argument("--arch", default="resnet18", choices=ARCHS, metavar="NAME", help="model")
    parser.add_argument(
        "--stem", default="cifar", choices=("cifar", "imagenet"), help="stem of the model"
    )
    parser.add_argument(
        "--image-size",
        type=whole(1),
        default=32,
        metavar="PIXELS",
        help="width and height of the images",
    )
    parser.add_argument(
        "--parallel", default="ddp", choices=("ddp", "fsdp"), help="a copy on every rank, or shards"
    )
    parser.add_argument(
        "--backend", default="gloo", choices=("gloo", "nccl"), help="backend of the process group"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="folder of the checkpoints (default: the temporary folder)"
    )
    parser.add_argument(
        "--variants",
        type=_variants,
        default="thread,at-once",
        metavar="V,V",
        help=f"how blocks save: {', '.join(VARIANTS)} (default: thread,at-once)",
    )
    parser.add_argument(
        "--disk-mb-per-s",
        type=whole(1),
        metavar="N",
        help="write files on this machine no faster than N MB/s (default: as fast as its disk)",
    )


def _variants(text: str) -> str:
    if unknown := set(text.split(",")) - set(VARIANTS):
        raise argparse.ArgumentTypeError(
            f'"{unknown.pop()}" is no variant: expected some of {", ".join(VARIANTS)}'
        )
    return text


def measure(options: Options, jobs: Jobs) -> Results:
    note(f"saving: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')}")
    job = ("-m", "benchmarks.ranks.saving", *as_arguments(options))
    with tempfile.TemporaryDirectory() as folder:
        if options.disk_mb_per_s is not None:
            library = slow_disk.build(Path(folder), options.disk_mb_per_s)
            jobs = replace(jobs, where=(*jobs.where, "-x", f"LD_PRELOAD={library}"))
        [found] = jobs.run_job(*job, ranks=jobs.slots).results
    return found


def table(results: Results) -> str:
    """Medians over the rounds; a ratio is relative to the block without a save in the same round."""
    seconds: dict[str, list[list[float]]] = results["step_s"]
    plain_means = [mean(block) for block in seconds[NO_SAVE]]
    plain_medians = [median(block) for block in seconds[NO_SAVE]]
    rows = []
    for variant, blocks in seconds.items():
        means = [mean(block) for block in blocks]
        saving = [block[0] for block in blocks]
        rows.append(
            [
                VARIANTS.get(variant, variant),
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
    start_benchmark("saving", "the cost of a save", BENCHMARK)
