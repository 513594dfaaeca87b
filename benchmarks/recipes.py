"""Compare complete trainings of `mpiddp train`: the first table of docs/evidence/accuracy.md.

    python -m benchmarks.recipes -H localhost:2 --seeds 5

The recipes alternate, one training of each for every seed. The accuracy is that of the last epoch, over all
images for testing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.report import markdown
from mpiddp.text import counted

# Each with the options that make it. The first one was the default until 2026.
RECIPES = {
    "resnet20, 4 epochs": ("--arch=resnet20", "--epochs=4", "--low-res-epochs=0", "--max-shift=4"),
    "the default": (),
}


@dataclass(frozen=True)
class Options:
    seeds: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=whole(1), default=5, metavar="K", help="trainings of each recipe"
    )


def measure(options: Options, jobs: Jobs) -> Results:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RECIPES}
    for seed in range(options.seeds):
        for name, recipe in RECIPES.items():
            runs[name].append(_train(jobs, seed, recipe))
            note(f"seed {seed}, {name}: {runs[name][-1]}")
    return {"ranks": jobs.slots, "runs": runs}


def _train(jobs: Jobs, seed: int, recipe: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        train = ("-m", "mpiddp", "train", f"--out={out}", f"--seed={seed}", *recipe, *jobs.training)
        finished = jobs.run_job(*train, ranks=jobs.slots)
        summary = json.loads((out / "summary.json").read_text())
    return {
        "accuracy": summary["test_accuracy"],
        "train_s": summary["wall_s"],
        "wall_s": finished.wall_s,
        "cpu_s": finished.cpu_s,
    }


def table(results: Results) -> str:
    runs = results["runs"]
    first = next(iter(runs.values()))
    head = ("recipe", "test accuracy", "of each seed", "training s", "command s", "CPU s", "time")
    rows = []
    for name, each in runs.items():
        middle = {key: median(run[key] for run in each) for key in each[0]}
        pairs = zip(each, first, strict=True)
        ratio = median(run["wall_s"] / base["wall_s"] for run, base in pairs)
        rows.append(
            (
                name,
                f"**{middle['accuracy']:.2%}**",
                ", ".join(f"{100 * run['accuracy']:.2f}" for run in each),
                *(f"{middle[key]:.0f}" for key in ("train_s", "wall_s", "cpu_s")),
                f"{ratio:.2f}",
            )
        )
    seeds = counted(len(first), "seed")
    return f"{counted(results['ranks'], 'rank')}, {seeds}, medians:\n\n{markdown(head, rows)}"


BENCHMARK = Benchmark(
    Options, _add_options, measure, table, takes_training=True, example="-H localhost:2 --seeds 5"
)

if __name__ == "__main__":
    start_benchmark("recipes", "accuracy and seconds of complete trainings", BENCHMARK)
