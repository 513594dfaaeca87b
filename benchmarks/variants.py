"""The speed-up by each setting of a training step on a CPU: the tables of docs/evidence/performance.md.

    python -m benchmarks.variants --file v.jsonl
    python -m benchmarks.variants --rounds 0 --file v.jsonl     # print the table only

Plain is the loop of most guides: DistributedDataParallel with its defaults, fp32, NCHW, torch's SGD. Every
variant has two ranks of its own, so that no variant reuses memory that another one freed. The variants'
blocks of steps alternate, so that other load affects all of them alike. "plain again" measures the noise
that remains. `benchmarks.ranks.variants` runs in the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.harness import append_record, read_records, start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note, run
from mpiddp.bench.options import add_rounds, as_arguments, parse_rank_options, picked
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios
from mpiddp.errors import UserError
from tests.support.ranks import mpirun_command

RANKS = 2  # per variant


@dataclass(frozen=True)
class Variant:
    channels_last: bool = False
    bf16: bool = False
    bucket_view: bool = False
    bucket_mb: int = 25
    fused: bool = False
    own_buffers: bool = False  # no broadcast of BatchNorm statistics
    compression: str = "off"
    compile: str = ""  # "inside" (the model within DDP) or "outside" (the model with DDP)
    keeps_memory: bool = False  # glibc does not return freed memory to the system


PLAIN = Variant()
TUNED_FP32 = Variant(
    channels_last=True,
    bucket_view=True,
    fused=True,
    own_buffers=True,
    keeps_memory=True,
)
DEFAULTS = replace(TUNED_FP32, bf16=True)
VARIANTS = {
    "plain": PLAIN,
    "plain again (noise)": PLAIN,
    "freed memory kept": Variant(keeps_memory=True),
    "channels_last": Variant(channels_last=True),
    "gradients as bucket views": Variant(bucket_view=True),
    "buckets of 100 MiB": Variant(bucket_mb=100),
    "fused SGD": Variant(fused=True),
    "no buffer broadcast": Variant(own_buffers=True),
    "bf16": Variant(bf16=True),
    "bf16 gradients on the wire": Variant(compression="bf16"),
    "all in fp32": TUNED_FP32,
    "all in fp32, NCHW": replace(TUNED_FP32, channels_last=False),
    "all in fp32, memory given back": replace(TUNED_FP32, keeps_memory=False),
    "all in fp32, buckets of 100 MiB": replace(TUNED_FP32, bucket_mb=100),
    "the defaults": DEFAULTS,
    "the defaults, memory given back": replace(DEFAULTS, keeps_memory=False),
    "the defaults, buckets of 10 MiB": replace(DEFAULTS, bucket_mb=10),
    "the defaults, buckets of 100 MiB": replace(DEFAULTS, bucket_mb=100),
    "the defaults, NCHW": replace(DEFAULTS, channels_last=False),
    "the defaults, bf16 gradients": replace(DEFAULTS, compression="bf16"),
    "the defaults, fp16 gradients": replace(DEFAULTS, compression="fp16"),
}
COMPILED = {
    "all in fp32, compiled inside DDP": replace(TUNED_FP32, compile="inside"),
    "all in fp32, compiled with DDP": replace(TUNED_FP32, compile="outside"),
    "the defaults, compiled inside DDP": replace(DEFAULTS, compile="inside"),
    "the defaults, compiled with DDP": replace(DEFAULTS, compile="outside"),
}


@dataclass(frozen=True)
class RankOptions:
    stem: str
    rounds: int
    steps: int
    batch_size: int
    compiled: bool
    only: str | None

    def variants(self) -> Mapping[str, Variant]:
        every = VARIANTS | COMPILED
        if self.only is None:
            return every if self.compiled else VARIANTS
        names = self.only.split("; ")
        unknown = [name for name in names if name not in every]
        if unknown or "plain" not in names:
            raise UserError(f"--only {self.only}: expected plain and others of: {'; '.join(every)}")
        return {name: every[name] for name in names}


@dataclass(frozen=True)
class Options(RankOptions):
    file: str


def rank_options(argv: list[str]) -> RankOptions:
    return parse_rank_options("benchmarks.ranks.variants", RankOptions, _add_rank_options, argv)[0]


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stem", default="imagenet", choices=("imagenet", "cifar"), help="stem of the ResNet-18"
    )
    add_rounds(parser, default=5, low=0)
    parser.add_argument(
        "--steps", type=whole(1), default=5, metavar="K", help="steps of each variant per round"
    )
    parser.add_argument(
        "--batch-size", type=whole(2), default=64, metavar="K", help="images per rank"
    )
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile")
    parser.add_argument(
        "--only",
        metavar="NAME; NAME",
        help="measure only these variants; plain must be one of them",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    _add_rank_options(parser)
    parser.add_argument(
        "--file",
        default="variants.jsonl",
        metavar="FILE",
        help="append the results of the job, and print the table of all jobs in this file",
    )


def measure(options: Options, jobs: Jobs) -> Results:
    file = Path(options.file)
    if options.rounds:
        variants = options.variants()
        ranks = RANKS * len(variants)
        note(f"variants: {len(variants)}, on {ranks} ranks")
        of_ranks = as_arguments(picked(RankOptions, options))
        job = ("-m", "benchmarks.ranks.variants", *of_ranks)
        [found] = run(mpirun_command(ranks, *job), timeout_s=jobs.timeout_s).results
        append_record(file, found)
    if not file.exists():
        raise UserError(f"--file {file} does not exist, and --rounds 0 measures nothing.")
    return {"jobs": read_records(file)}


def table(results: Results) -> str:
    """For each stem: step times, and the speed relative to plain in the same round.

    The last column has the median of each job.
    """
    tables = []
    for stem in dict.fromkeys(job["stem"] for job in results["jobs"]):
        runs = [job["seconds"] for job in results["jobs"] if job["stem"] == stem]
        rows = []
        for name in dict.fromkeys(name for each in runs for name in each):
            ours = [each for each in runs if name in each]
            speeds = [ratios(each["plain"], each[name]) for each in ours]
            every = median(speed for job in speeds for speed in job)
            ms = median(s for each in ours for s in each[name]) * 1e3
            medians = ", ".join(f"{median(job):.2f}" for job in speeds)
            rows.append([name, f"{ms:.0f}", f"{every:.2f}", medians])
        head = ("variant", "ms a step", "speed", "jobs")
        tables.append(f"ResNet-18, {stem} stem:\n\n{markdown(head, rows)}")
    return "\n\n".join(tables)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    takes_hosts=False,
    example="--timeout 3600 --file v.jsonl",
)

if __name__ == "__main__":
    start_benchmark("variants", "the speed-up by each setting of a step", BENCHMARK)
