"""Compare the loss curves of plain and of tuned settings over several seeds.

    python -m benchmarks.curves --seeds 5 --arch resnet20

Plain is fp32, NCHW and DDP's own buckets; tuned is the defaults of this machine. All settings train on the
same images in the same order from the same weights, so the curves of one seed differ only by rounding. The
difference is harmless if it is smaller than the spread between seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks.harness import read_records, start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, progress
from mpiddp.bench.report import markdown

EVERY = 20  # steps; each loss is the mean over them
PLAIN = "plain"
SETTINGS = {
    PLAIN: ["--amp=off", "--no-channels-last"],
    "tuned": [],
    "tuned, bf16 gradients": ["--grad-compression=bf16"],
}


@dataclass(frozen=True)
class Options:
    seeds: int
    steps: int
    ranks: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=whole(2), default=3, metavar="K", help="number of seeds")
    parser.add_argument(
        "--steps", type=whole(1), default=200, metavar="K", help="steps of each curve"
    )
    parser.add_argument(
        "--ranks", type=whole(1), default=2, metavar="N", help="ranks, all on this machine"
    )


def measure(options: Options, jobs: Jobs) -> Results:
    curves: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
    for seed in range(options.seeds):
        for name, settings in SETTINGS.items():
            curves[name].append(_losses(settings, seed, options, jobs))
            last = f"loss {curves[name][-1][-1]:.3f}"
            progress(f"curves, {name}", options.ranks, seed + 1, options.seeds, last)
    return {"every": EVERY, "curves": curves}


def _losses(settings: list[str], seed: int, options: Options, jobs: Jobs) -> list[float]:
    """The training loss, as the mean over each EVERY steps."""
    with tempfile.TemporaryDirectory() as folder:
        train = ["-m", "mpiddp", "train", *settings, f"--seed={seed}", f"--out={folder}"]
        train += ["--epochs=1", f"--steps-per-epoch={options.steps}", f"--log-every={EVERY}"]
        jobs.run_here(options.ranks, *train, *jobs.training)
        records = read_records(Path(folder, "metrics.jsonl"))
    return [record["train_loss"] for record in records if "train_loss" in record]


def table(results: Results) -> str:
    """Means over the seeds, their spread, and each setting's mean difference from plain for the same seed."""
    curves: dict[str, list[list[float]]] = results["curves"]
    others = [name for name in curves if name != PLAIN]
    head = ["step", PLAIN, "spread of its seeds"]
    for name in others:
        head += [name, f"from {PLAIN}"]
    rows = []
    for index in range(len(curves[PLAIN][0])):
        plain = [curve[index] for curve in curves[PLAIN]]
        row = [str((index + 1) * results["every"]), f"{mean(plain):.3f}", f"{stdev(plain):.3f}"]
        for name in others:
            ours = [curve[index] for curve in curves[name]]
            distance = mean(a - b for a, b in zip(ours, plain, strict=True))
            row += [f"{mean(ours):.3f}", f"{distance:+.3f}"]
        rows.append(row)
    return markdown(head, rows)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    takes_hosts=False,
    takes_training=True,
    example="--seeds 5 --arch resnet20",
)

if __name__ == "__main__":
    start_benchmark("curves", "loss curves of plain and of tuned settings", BENCHMARK)
