"""Measures what needs a GPU, and prints docs/performance.md's tables of it. Without one they stay empty.

    python -m benchmarks.gpu > tables.md       # some 10 minutes on one H200

Each figure is of a run of `mpiddp launch … -m mpiddp train` on one rank; where it is a ratio, the settings
alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mpiddp.train.data.arrays import default_data_dir
from tests.ranks import ROOT, clean_env, find_mpirun

IMAGENET = ["--use-syn", "--dataset=image-folder", "--arch=resnet50", "--batch-size=256"]
GUIDES = ["--use-syn", "--arch=resnet152", "--stem=imagenet", "--batch-size=8192"]
FP32 = ["--amp=off", "--no-channels-last"]
SETTINGS = {
    "fp32, NCHW": FP32,
    "fp32, channels_last": ["--amp=off"],
    "bf16, NCHW": ["--no-channels-last"],
    "the defaults": [],
    "the defaults, --compile default": ["--compile=default"],
    "the defaults, --compile reduce-overhead": ["--compile=reduce-overhead"],
}
CIFAR10 = [
    "--arch=resnet18", "--batch-size=512", "--epochs=24", "--label-smoothing=0.1",
]  # fmt: skip


class Failed(Exception):
    """A row that could not be measured: the others still can."""


def trained(*options: str) -> dict[str, Any]:
    """The summary of a run with these options on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mpiddp", "launch", "-H", "localhost:1"]
        command += ["-m", "mpiddp", "train", *options, f"--out={folder}", "--save-every=100000"]
        env = clean_env({"MPIDDP_DATA": str(default_data_dir())})
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(done.stderr.strip().splitlines()[-1])
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def resnet50(options: argparse.Namespace) -> str:
    steps = f"--steps-per-epoch={options.steps}"
    speeds = [
        trained(*IMAGENET, "--epochs=1", steps)["images_per_s"] for _ in range(options.rounds)
    ]
    return f"{median(speeds):,.0f} images/s"


def resnet152(options: argparse.Namespace) -> str:
    """Ours and the guides' fp32 in alternation: the ratio of each round, and the median of them."""
    epochs = f"--epochs={max(2, options.steps // 25)}"  # of the 6 steps that CIFAR-10's size gives
    ratios = []
    for _ in range(options.rounds):
        plain = trained(*GUIDES, *FP32, epochs)["images_per_s"]
        ratios.append(trained(*GUIDES, epochs)["images_per_s"] / plain)
    return f"{median(ratios):.2f} of fp32's images/s"


def cifar10(options: argparse.Namespace) -> str:
    found = trained(*CIFAR10)
    images = found["steps"] * found["global_batch_size"]
    seconds = images / found["images_per_s"]
    return f"{found['test_accuracy']:.2%} after {seconds:.0f} s of steps ({found['wall_s']:.0f} s in all)"


def image_folder(options: argparse.Namespace) -> str:
    """Whether decoded JPEGs keep ResNet-50 fed, by the most that any number of workers gives."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mpiddp", "bench", "loader", "-H", "localhost:1"]
        command += ["--arch=resnet50", "--batch-size=256", "--images=2048", "--batches=16"]
        command += ["--workers=4,8,12,16", f"--out={folder}"]
        done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(done.stderr.strip().splitlines()[-1])
        found = json.loads((Path(folder) / "loader.json").read_text())["results"]["sources"]
    best = max(
        (source for source in found if source["source"].startswith("image folder")),
        key=lambda source: source["times_model"],
    )
    return f"{best['times_model']:.2f} ({best['images_per_s']['median']:,.0f} images/s)"


def two_ranks(options: argparse.Namespace) -> str:
    command = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command += [sys.executable, "-m", "tests.jobs.two_on_one_gpu"]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=180
    )
    if done.returncode != 0:
        raise Failed(f"code {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


ROWS = {
    "ResNet-50, 224×224, synthetic, bf16, channels_last": ("≥ 3,100 images/s", resnet50),
    "ResNet-152, 32×32, batch 8192, the defaults over fp32": ("≥ 2.5", resnet152),
    "CIFAR-10 to 94 %": ("≤ 60 s", cifar10),
    "image folder, over what ResNet-50 takes": ("≥ 1.0", image_folder),
    "two NCCL ranks on one GPU, each with its NCCL_HOSTID": ("runs", two_ranks),
}


def print_settings(options: argparse.Namespace) -> None:
    """What each setting is worth with ResNet-50: its speed over fp32's in the same round."""
    print(
        "\nConvolutions in fp32 use TF32, as torch has it.\n\n| setting | images/s | speed |\n|---|---|---|"
    )
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    steps = f"--steps-per-epoch={options.steps}"
    for _ in range(options.rounds if torch.cuda.is_available() else 0):
        for name, setting in SETTINGS.items():
            with contextlib.suppress(Failed):  # its row stays empty
                found = trained(*IMAGENET, *setting, "--epochs=1", steps)
                speeds[name].append(found["images_per_s"])
    for name, each in speeds.items():
        ratios = [ours / plain for ours, plain in zip(each, speeds["fp32, NCHW"], strict=False)]
        figures = f"{median(each):,.0f} | {median(ratios):.2f}" if ratios else " | "
        print(f"| {name} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what needs a GPU.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU here"
    print(f"| what | wanted | {gpu} |\n|---|---|---|")
    for what, (wanted, measure) in ROWS.items():
        try:
            found = measure(options) if torch.cuda.is_available() else ""
        except (Failed, subprocess.TimeoutExpired) as error:
            found = f"failed: {error}"
        print(f"| {what} | {wanted} | {found} |", flush=True)
    print_settings(options)


if __name__ == "__main__":
    main()
