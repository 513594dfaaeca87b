"""All that waits for a GPU, in one run of at most 12 minutes, the most important first.

    python -m tests.gpu.session --out gpu            # with one GPU, after ./run.sh test --version

Each check has a limit, and its line of gpu/session.jsonl is written as soon as it ends. Its output is beside
it. Without a GPU this is a rehearsal: the tests skip, and the figures have tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 720
PYTHON = (sys.executable, "-m")
LAUNCH = (*PYTHON, "mpiddp", "launch")

# The processes of a job whose rank holds a tensor on the GPU, with their memory, and those that use the GPU.
# The process of torch's store must be small, and must not be among the latter.
STORE = """
import os, subprocess, torch, torch.distributed as dist
on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
held = torch.ones(1 << 20, device="cuda" if on_gpu else "cpu")
dist.all_reduce(held)
print(subprocess.run(["ps", "-eo", "pid,rss,comm"], capture_output=True, text=True).stdout)
if on_gpu:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv"]
    print(subprocess.run(query, capture_output=True, text=True).stdout)
"""


class Check(NamedTuple):
    """A command, its time limit, and what it shows."""

    shows: str
    limit_s: int
    command: tuple[str, ...]


CHECKS = {
    "tests": Check(
        "a hang in NCCL is named with its line; saves, resumes and capturable kernels are exact",
        270,
        (*PYTHON, "pytest", "-q", "-m", "gpu", "-n", "4", "--dist", "load", "tests/gpu"),
    ),
    "shared": Check(
        "two ranks on one GPU: the launcher's note, and NCCL's refusal with its known cause",
        40,
        (*LAUNCH, "-H", "localhost:2", "--timeout", "20", "examples/ddp.py"),
    ),
    "store": Check(
        "the process of torch's store, with a build for CUDA",
        40,
        (*LAUNCH, "-H", "localhost:1", "{out}/store.py"),
    ),
    "cifar10": Check(
        "CIFAR-10 to 94 % in 60 s, and then in 20 s",
        180,
        (
            *PYTHON,
            "benchmarks.gpu",
            "--only",
            "cifar10",
            "--limit",
            "170s",
            "--out",
            "{out}/cifar10.jsonl",
        ),
    ),
    "resnet50": Check(
        "ResNet-50, compiled, 256 images of 224 pixels",
        190,
        (
            *PYTHON,
            "benchmarks.gpu",
            "--only",
            "resnet50",
            "--limit",
            "180s",
            "--out",
            "{out}/resnet50.jsonl",
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.session", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="FOLDER")
    out: Path = parser.parse_args().out.resolve()
    out.mkdir(exist_ok=True)
    (out / "store.py").write_text(STORE, encoding="utf-8")
    for name, check in CHECKS.items():
        began = time.monotonic()
        command = [word.replace("{out}", str(out)) for word in check.command]
        with (out / f"{name}.txt").open("w", encoding="utf-8") as file:
            try:
                how = {"cwd": ROOT, "stdout": file, "stderr": subprocess.STDOUT}
                code: int | None = subprocess.run(command, timeout=check.limit_s, **how).returncode
            except subprocess.TimeoutExpired:
                code = None
        seconds = round(time.monotonic() - began, 1)
        line = json.dumps({"name": name, "shows": check.shows, "code": code, "seconds": seconds})
        print(line, flush=True)
        with (out / "session.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(f"{line}\n")


if __name__ == "__main__":
    main()
