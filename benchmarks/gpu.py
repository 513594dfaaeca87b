"""How fast it is on a GPU. Each figure is appended to FILE as soon as it is there; variants alternate.

    python -m benchmarks.gpu --out gpu.jsonl        # 25 minutes on one GPU, estimated
    python -m benchmarks.gpu --only step,loader

Without a GPU it is a rehearsal with tiny sizes. `pytest -m gpu` says whether the code is right there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp.bench.figures import Result, ratios, spread, turns
from mpiddp.bench.jobs import launch_command
from mpiddp.bench.machine import machine
from mpiddp.bench.start import JOB, LAUNCHERS, time_start

PLAIN, DEFAULTS = "fp32", "the defaults"
SETTINGS: dict[str, tuple[str, ...]] = {
    PLAIN: ("--amp=off",),
    DEFAULTS: (),
    "--compile default": ("--compile=default",),
    "--compile reduce-overhead": ("--compile=reduce-overhead",),
}
TARGET_ACCURACY = 0.94


class Bench:
    """Runs commands in `folder`. `is_tiny`: a rehearsal."""

    def __init__(self, folder: Path, *, is_tiny: bool) -> None:
        self.folder, self.is_tiny, self._count = folder, is_tiny, 0

    def run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def train(self, *options: str) -> Result:
        """The summary of a training on one GPU."""
        self._count += 1
        out = self.folder / str(self._count)
        tiny = ("--dataset=cifar10", "--use-syn", "--arch=resnet20", "--batch-size=4", "--epochs=1")
        if self.is_tiny:
            options = (*options, *tiny, "--steps-per-epoch=2")
        job = ("-m", "mpiddp", "train", f"--out={out}", "--save-every=100000", *options)
        self.run(*launch_command("-H", "localhost:1"), *job)
        found: Result = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return found

    def alternate(self, variants: Mapping[str, Sequence[str]], *shared: str) -> Result:
        """images/s of each variant in two rounds."""
        found: dict[str, list[float]] = {name: [] for name in variants}
        for _, name in turns(list(variants), 1 if self.is_tiny else 2):
            found[name].append(self.train(*shared, *variants[name])["images_per_s"])
        return {"images_per_s": found}


def resnet50(bench: Bench) -> Result:
    """ResNet-50 with each of the defaults switched off, and under torch.compile."""
    model = ("--dataset=image-folder", "--use-syn", "--arch=resnet50", "--batch-size=256")
    return bench.alternate(SETTINGS, *model, "--epochs=1", "--steps-per-epoch=60")


def resnet152(bench: Bench) -> Result:
    """ResNet-152 at 32×32 with 8192 images: the defaults and the fp32 of the guides."""
    model = ("--use-syn", "--arch=resnet152", "--stem=imagenet", "--batch-size=8192", "--epochs=8")
    found = bench.alternate({name: SETTINGS[name] for name in (DEFAULTS, PLAIN)}, *model)
    speeds = found["images_per_s"]
    return {**found, "ratio": spread(ratios(speeds[DEFAULTS], speeds[PLAIN]))["median"]}


def cifar10(bench: Bench) -> Result:
    """CIFAR-10 to 94 %: ever fewer epochs, as long as they reach it."""
    found = {}
    for epochs in (24, 16, 12, 10):
        recipe = ("--arch=resnet18", "--batch-size=512", "--lr=0.2")
        summary = bench.train(*recipe, f"--epochs={epochs}")
        found[f"{epochs} epochs"] = {name: summary[name] for name in ("test_accuracy", "wall_s")}
        if bench.is_tiny or summary["test_accuracy"] < TARGET_ACCURACY:
            break
    return found


def _bench(bench: Bench, name: str, sizes: Sequence[str], tiny: Sequence[str]) -> Result:
    out = bench.folder / name
    small = ("--arch=resnet20", "--batch-size=4", "--rounds=1", *tiny)
    options = [*(small if bench.is_tiny else sizes), "-H", "localhost:1", f"--out={out}"]
    bench.run(sys.executable, "-m", "mpiddp", "bench", name, *options)
    return dict(json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["results"])


def step(bench: Bench) -> Result:
    sizes = ("--dataset=image-folder", "--arch=resnet50", "--batch-size=256", "--rounds=3")
    return _bench(bench, "step", sizes, ("--steps=4",))


def loader(bench: Bench) -> Result:
    sizes = ("--arch=resnet50", "--batch-size=256", "--images=2048", "--workers=8,12,16")
    return _bench(bench, "loader", sizes, ("--images=8", "--batches=2", "--workers=1"))


def start(bench: Bench) -> Result:
    """From the command to the end of the first all-reduce: `mpiddp launch` and torchrun."""
    job = (JOB[0], "gloo" if bench.is_tiny else "nccl")
    found: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    for number, name in turns(LAUNCHERS, 1 if bench.is_tiny else 5, warmup=1):
        wall_s = time_start(name, 1, 600.0, job)["wall_s"]
        if number > 0:
            found[name].append(wall_s)
    return {"wall_s": found, "ratio": spread(ratios(*found.values()))["median"]}


MEASURED = {each.__name__: each for each in (resnet50, resnet152, start, step, loader, cifar10)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), metavar="FILE")
    parser.add_argument("--only", default=",".join(MEASURED), metavar="NAME,NAME")
    options = parser.parse_args()
    here = machine()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), is_tiny=not here["gpus"])
        for name in options.only.split(","):
            found = {"gpus": here["gpus"], "torch": here["torch"], "figure": MEASURED[name](bench)}
            line = json.dumps({"name": name, **found})
            print(line, flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
