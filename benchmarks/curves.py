"""Shows that speed does not change the result: loss curves of plain and of tuned settings, over seeds.

    python -m benchmarks.curves --seeds 3 --steps 200 > curves.md

Plain is fp32, NCHW, DDP's own buckets; tuned are the defaults of this machine. Both train on the same
images in the same order from the same weights, so a seed's two curves differ by rounding alone. What
that may come to is what another seed comes to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

from mpiddp.train.data.arrays import default_data_dir
from tests.ranks import ROOT, clean_env

EVERY = 20  # steps, over which a loss is the mean
SETTINGS = {
    "plain": ["--amp=off", "--no-channels-last"],
    "tuned": [],
    "tuned, bf16 gradients": ["--grad-compression=bf16"],
}


def losses(settings: list[str], seed: int, options: argparse.Namespace) -> list[float]:
    """The mean training loss of each EVERY steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mpiddp", "launch", "-n", f"{options.ranks}"]
        command += ["-H", f"localhost:{options.ranks}", "-m", "mpiddp", "train", *settings]
        command += [f"--data-dir={default_data_dir()}", f"--seed={seed}", f"--out={folder}"]
        command += ["--epochs=1", f"--steps-per-epoch={options.steps}", f"--log-every={EVERY}"]
        done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["train_loss"] for record in records if "train_loss" in record]


def table(curves: dict[str, list[list[float]]]) -> str:
    """Means over the seeds, their spread, and the mean distance of each setting from plain's same seed."""
    plain = curves["plain"]
    others = [name for name in curves if name != "plain"]
    rows = [
        "| step | plain | spread of its seeds | "
        + " | ".join(f"{name} | from plain" for name in others)
        + " |",
        "|---|---|---|" + "---|---|" * len(others),
    ]
    for index in range(len(plain[0])):
        values = [curve[index] for curve in plain]
        row = f"| {(index + 1) * EVERY} | {mean(values):.3f} | {stdev(values):.3f} |"
        for name in others:
            ours = [curve[index] for curve in curves[name]]
            distance = mean(a - b for a, b in zip(ours, values, strict=True))
            row += f" {mean(ours):.3f} | {distance:+.3f} |"
        rows.append(row)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare loss curves of plain and tuned settings.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    curves = {
        name: [losses(settings, seed, options) for seed in range(options.seeds)]
        for name, settings in SETTINGS.items()
    }
    print(table(curves))


if __name__ == "__main__":
    main()
