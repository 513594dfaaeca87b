"""How fast it is on a GPU. Each figure is appended to FILE as soon as it is there; variants alternate.

    python -m benchmarks.gpu --out gpu.jsonl        # until 9 minutes have passed; again: what FILE lacks
    python -m benchmarks.gpu --only step,start

Without a GPU it is a rehearsal with tiny sizes. `pytest -m gpu` says whether the code is right there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.harness import turns
from benchmarks.start import LAUNCHERS, start_command, time_start
from mpiddp.arguments import duration
from mpiddp.bench.measured_jobs import Result, launch_command, machine

PLAIN, DEFAULTS = "fp32", "the defaults"
SETTINGS: dict[str, tuple[str, ...]] = {
    PLAIN: ("--amp=off",),
    DEFAULTS: (),
    "--compile off": ("--compile=off",),
    "--parallel fsdp": ("--parallel=fsdp",),
}
RESNET50 = ("--dataset=image-folder", "--use-syn", "--arch=resnet50", "--batch-size=256")
RESNET152 = ("--use-syn", "--arch=resnet152", "--stem=imagenet", "--batch-size=8192", "--epochs=8")
CIFAR10 = ("--arch=resnet18", "--batch-size=512", "--lr=0.2")
Figure = Callable[[Path, bool], Result]  # from an empty folder, and whether this is a rehearsal


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def training(folder: Path, is_tiny: bool, *, options: tuple[str, ...]) -> Result:
    """A training on one GPU."""
    tiny = ("--dataset=cifar10", "--use-syn", "--arch=resnet20", "--batch-size=4", "--epochs=1")
    if is_tiny:
        options = (*options, *tiny, "--steps-per-epoch=2", "--parallel=ddp")
    job = ("-m", "mpiddp", "train", f"--out={folder}", "--save-every=100000", *options)
    run(*launch_command("-H", "localhost:1"), *job)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {name: summary[name] for name in ("images_per_s", "test_accuracy", "wall_s")}


def step(folder: Path, is_tiny: bool) -> Result:
    """The loop of `mpiddp train` beside a bare loop."""
    small = ("--arch=resnet20", "--batch-size=4", "--rounds=1", "--steps=4")
    sizes = small if is_tiny else (*RESNET50[:1], *RESNET50[2:], "--rounds=3")
    run(sys.executable, "-m", "benchmarks.step", *sizes, "-H", "localhost:1", f"--out={folder}")
    record = json.loads((folder / "step.json").read_text(encoding="utf-8"))
    return dict(record["results"])


def start(folder: Path, is_tiny: bool, *, launcher: str) -> Result:
    """From the command to the end of the first all-reduce."""
    job = ("gloo" if is_tiny else "nccl",)
    command = start_command(launcher, ("-H", "localhost:1"), 1, 600.0, job=job)
    wall_s, cpu_s = time_start(command, 600.0)
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def figures(rounds: int) -> Iterator[tuple[str, str, Figure]]:
    """Each figure: its name, its variant, and the function that measures it, in less than four minutes."""
    short = (*RESNET50, "--epochs=1", "--steps-per-epoch=60")
    for number, name in turns(list(SETTINGS), rounds):
        yield "resnet50", f"{name}, {number}", partial(training, options=(*short, *SETTINGS[name]))
    for number, name in turns((DEFAULTS, PLAIN), rounds):
        options = (*RESNET152, *SETTINGS[name])
        yield "resnet152", f"{name}, {number}", partial(training, options=options)
    for number, name in turns(LAUNCHERS, 2 * rounds, warmup=1):
        yield "start", f"{name}, {number}", partial(start, launcher=name)
    yield "step", "", step
    for epochs in (24, 16, 12, 10):
        options = (*CIFAR10, f"--epochs={epochs}")
        yield "cifar10", f"{epochs} epochs", partial(training, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), metavar="FILE")
    parser.add_argument("--only", metavar="NAME,NAME", help="resnet50, resnet152, start, …")
    limit = "begin no figure that would end later (default: 9m)"
    parser.add_argument("--limit", type=duration, default=540.0, metavar="TIME", help=limit)
    options = parser.parse_args()
    here = machine()
    ends, longest_s, left = time.monotonic() + options.limit, 0.0, 0
    with options.out.open("a+", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        file.seek(0)
        records = [json.loads(line) for line in file]
        done = {(record["name"], record["variant"]) for record in records}
        every = figures(2 if here["gpus"] else 1)
        for index, (name, variant, measure) in enumerate(every):
            is_wanted = options.only is None or name in options.only.split(",")
            if not is_wanted or (name, variant) in done:
                continue
            began = time.monotonic()
            if began + longest_s > ends:
                left += 1
                continue
            figure = measure(Path(folder) / str(index), not here["gpus"])
            longest_s = max(longest_s, time.monotonic() - began)
            record = {"name": name, "variant": variant, "gpus": here["gpus"]}
            line = json.dumps({**record, "torch": here["torch"], "figure": figure})
            print(line, flush=True)
            file.write(f"{line}\n")
            file.flush()
    if left:
        print(f"{left} figures are left: run the same command again.")


if __name__ == "__main__":
    main()
