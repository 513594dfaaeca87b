"""Measure training on a GPU, and print the GPU tables of docs/performance.md; they are empty without a GPU.

    python -m benchmarks.gpu       # about 10 minutes on one H200

The training figures come from `mpiddp launch … -m mpiddp train` on one rank. The settings of a ratio
alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import run_ranks, start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import JobFailed, Jobs, note, run
from mpiddp.bench.machine import machine
from mpiddp.bench.options import add_rounds
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios, turns

IMAGENET = ["--use-syn", "--dataset=image-folder", "--arch=resnet50", "--batch-size=256"]
RESNET152 = ["--use-syn", "--arch=resnet152", "--stem=imagenet", "--batch-size=8192"]
FP32 = ["--amp=off", "--no-channels-last"]
PLAIN = "fp32, NCHW"
SETTINGS = {
    PLAIN: FP32,
    "fp32, channels_last": ["--amp=off"],
    "bf16, NCHW": ["--no-channels-last"],
    "the defaults": [],
    "the defaults, --compile default": ["--compile=default"],
    "the defaults, --compile reduce-overhead": ["--compile=reduce-overhead"],
}
CIFAR10 = [
    "--arch=resnet18", "--batch-size=512", "--epochs=24", "--label-smoothing=0.1",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    rounds: int
    steps: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=3)
    parser.add_argument(
        "--steps", type=whole(1), default=100, metavar="K", help="steps of each run"
    )


def measure(options: Options, jobs: Jobs) -> Results:
    gpus = machine().gpus
    found = {what: _row(what, options, jobs) if gpus else "" for what in ROWS}
    return {
        "gpu": gpus[0] if gpus else "no GPU here",
        "rows": found,
        "settings": _settings(options, jobs) if gpus else {name: [] for name in SETTINGS},
    }


def _row(what: str, options: Options, jobs: Jobs) -> str:
    """The result of one row, or the reason of its failure; the other rows are measured anyway."""
    note(f"gpu: {what}")
    _, measure_row = ROWS[what]
    try:
        return measure_row(options, jobs)
    except JobFailed as failure:
        return f"failed: code {failure.code}: {str(failure)[-200:].splitlines()[-1]}"


def _train(jobs: Jobs, *options: str) -> Results:
    """Train on one rank with these options, and return summary.json."""
    with tempfile.TemporaryDirectory() as folder:
        train = ["-m", "mpiddp", "train", *options, f"--out={folder}", "--save-every=100000"]
        jobs.run_here(1, *train)
        summary: Results = json.loads((Path(folder) / "summary.json").read_text())
    return summary


def _resnet50(options: Options, jobs: Jobs) -> str:
    settings = (*IMAGENET, "--epochs=1", f"--steps-per-epoch={options.steps}")
    speeds = [_train(jobs, *settings)["images_per_s"] for _ in range(options.rounds)]
    return f"{median(speeds):,.0f} images/s"


def _resnet152(options: Options, jobs: Jobs) -> str:
    """The speed of the defaults relative to fp32, NCHW."""
    epochs = f"--epochs={max(2, options.steps // 25)}"  # an epoch of 50,000 images has 6 steps
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _, is_plain in turns(list(speeds), options.rounds):
        precision = FP32 if is_plain else []
        speeds[is_plain].append(_train(jobs, *RESNET152, *precision, epochs)["images_per_s"])
    return f"{median(ratios(speeds[False], speeds[True])):.2f} times fp32's images/s"


def _cifar10(options: Options, jobs: Jobs) -> str:
    found = _train(jobs, *CIFAR10)
    images = found["steps"] * found["global_batch_size"]
    seconds = images / found["images_per_s"]
    return f"{found['test_accuracy']:.2%} after {seconds:.0f} s of steps ({found['wall_s']:.0f} s in all)"


def _image_folder(options: Options, jobs: Jobs) -> str:
    """Speed of decoding JPEGs relative to ResNet-50, with the best number of workers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mpiddp", "bench", "loader", "-H", "localhost:1"]
        command += ["--arch=resnet50", "--batch-size=256", "--images=2048", "--batches=16"]
        command += ["--workers=4,8,12,16", f"--out={folder}"]
        run(command, timeout_s=jobs.timeout_s)
        found = json.loads((Path(folder) / "loader.json").read_text())["results"]["sources"]
    best = max(
        (source for source in found if source["source"].startswith("image folder")),
        key=lambda source: source["times_model"],
    )
    return f"{best['times_model']:.2f} ({best['images_per_s']['median']:,.0f} images/s)"


def _two_ranks(options: Options, jobs: Jobs) -> str:
    return "\n".join(run_ranks(2, "-m", "tests.jobs.two_on_one_gpu", timeout_s=180).lines).strip()


ROWS = {
    "ResNet-50, 224×224, synthetic, bf16, channels_last": ("≥ 3,100 images/s", _resnet50),
    "ResNet-152, 32×32, batch 8192: speed of the defaults over fp32": ("≥ 2.5", _resnet152),
    "CIFAR-10 to 94 %": ("≤ 60 s", _cifar10),
    "image folder: images/s of the loader over those of ResNet-50": ("≥ 1.0", _image_folder),
    "two NCCL ranks on one GPU, each with its NCCL_HOSTID": ("runs", _two_ranks),
}


def _settings(options: Options, jobs: Jobs) -> dict[str, list[float]]:
    """ResNet-50's images/s with each setting. A failed run leaves out its round."""
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    settings = (*IMAGENET, "--epochs=1", f"--steps-per-epoch={options.steps}")
    for number, name in turns(list(SETTINGS), options.rounds):
        note(f"gpu: {name}, round {number} of {options.rounds}")
        with contextlib.suppress(JobFailed):
            speeds[name].append(_train(jobs, *settings, *SETTINGS[name])["images_per_s"])
    return speeds


def table(results: Results) -> str:
    rows = [[name, target, results["rows"][name]] for name, (target, _) in ROWS.items()]
    speeds: dict[str, list[float]] = results["settings"]
    worth = []
    for name, each in speeds.items():
        figures = ["", ""]
        if each and len(each) == len(speeds[PLAIN]):
            figures = [f"{median(each):,.0f}", f"{median(ratios(each, speeds[PLAIN])):.2f}"]
        worth.append([name, *figures])
    return (
        f"{markdown(('measurement', 'target', results['gpu']), rows)}\n\n"
        "Convolutions in fp32 use TF32, torch's default.\n\n"
        f"{markdown(('setting', 'images/s', 'speed'), worth)}"
    )


BENCHMARK = Benchmark(
    Options, _add_options, measure, table, takes_hosts=False, example="--timeout 1200"
)

if __name__ == "__main__":
    start_benchmark("gpu", "training on a GPU", BENCHMARK)
