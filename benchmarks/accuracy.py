"""The accuracy of recipes of CIFAR-10, and their CPU seconds: figures of docs/evidence/accuracy.md.

    python -m benchmarks.accuracy '{}' '{"alternates": true}' --seeds 0 1 2
    python -m benchmarks.accuracy '{}' --seeds 0 1 2 --images test
    python -m benchmarks.accuracy '{}' '{"epochs": 6}' --without-bf16

Each argument has the fields of `Ideas` (benchmarks/ranks/accuracy.py) that differ from the default. Choose a
recipe by the last 5,000 images for training, which are then left out of the training. `--images test` is for
the figures of a recipe that has been chosen. Each training is one job on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmarks.harness import ENV
from mpiddp.bench.measured_jobs import launch_command, output_of, read_results
from mpiddp.train.data import default_folder

HELD_OUT = 5_000
# One processor becomes one without instructions for bf16.
ONLY_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("recipes", type=json.loads, nargs="+", metavar="JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images", choices=("held-out", "test"), default="held-out")
    parser.add_argument("--without-bf16", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, default=default_folder())
    parser.add_argument("--timeout", type=float, default=1500.0, help="seconds for a training")
    options = parser.parse_args()
    os.environ.update({**ENV, **(ONLY_AVX2 if options.without_bf16 else {})})
    for seed in options.seeds:
        for recipe in options.recipes:
            settings = json.dumps({**recipe, "seed": seed})
            job = (
                "-m",
                "benchmarks.ranks.accuracy",
                settings,
                str(options.data_dir),
                options.images,
            )
            command = [*launch_command("-H", f"localhost:{options.ranks}"), *job]
            [result] = read_results(output_of(command, timeout_s=options.timeout))
            bf16 = not options.without_bf16
            line = {
                "recipe": recipe,
                "seed": seed,
                "bf16": bf16,
                "images": options.images,
                **result,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
