"""Measure the figures of docs/evidence/performance.md, in about 30 minutes on two idle cores.

    python -m benchmarks.all --out figures.md              # all; some need root
    python -m benchmarks.all --only start,restart --brief  # whether they still work, in seconds

Each table is appended to FILE as soon as it is there, with its command, the commit and the machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.harness import ENV, markdown

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "-m mpiddp train --use-syn --arch resnet20 --batch-size 8 --amp off --num-workers 0"
RESNET50 = "--dataset image-folder --image-size 128 --arch resnet50 --batch-size 8"
TINY = "--arch resnet20 --batch-size 2"


class Figure(NamedTuple):
    """A module with its arguments, and with those to try it. `hosts`: so many of a test cluster."""

    module: str
    full: str
    brief: str
    hosts: int = 0
    is_in_all: bool = True

    def command(self, folder: str, *, is_brief: bool) -> list[str]:
        """The command, whose job runs in this folder, as do the hosts."""
        arguments = self.brief if is_brief else self.full
        cluster = ["-m", "tests.support.cluster", "--cwd", folder, str(self.hosts), "--"]
        before = [*cluster, sys.executable] if self.hosts else []
        return [sys.executable, *before, "-m", self.module, *shlex.split(arguments)]


FIGURES = {
    "first": Figure("benchmarks.all", "--first 20", "--first 1"),
    "start": Figure("benchmarks.start", "--ranks 2,4,8", "--ranks 1 --rounds 1"),
    "start_variable": Figure(
        "benchmarks.start", "--ranks 2 --rounds 12 --variable", "--ranks 1 --rounds 1 --variable"
    ),
    "start_hosts": Figure(
        "benchmarks.start",
        "--ranks 3 --on node0,node1,node2",
        "--ranks 2 --rounds 1 --on node0,node1",
        3,
    ),
    "restart": Figure(
        "benchmarks.restart",
        "-H localhost:2 --rounds 12 --timeout 40",
        "-H localhost:2 --rounds 1 --steps 20 --timeout 40",
    ),
    "restart_hosts": Figure(
        "benchmarks.restart",
        "-H node0,node1,node2 --rounds 12 --timeout 40",
        "-H node0,node1 --rounds 1 --steps 20",
        3,
    ),
    "step": Figure(
        "benchmarks.step",
        "-H localhost:2 --arch resnet18 --batch-size 64 --stem imagenet --amp off --rounds 3",
        f"-H localhost:1 {TINY} --rounds 1 --steps 4",
    ),
    "saving": Figure(
        "benchmarks.saving",
        f"-H localhost:2 --rounds 8 --steps 4 {RESNET50}",
        f"-H localhost:1 {TINY} --rounds 1 --steps 2",
    ),
    "beside_dcp": Figure(
        "mpiddp",
        "launch -H localhost:2 -m benchmarks.beside_dcp --rounds 13",
        "launch -H localhost:1 -m benchmarks.beside_dcp --rounds 1",
    ),
    "scaling": Figure(
        "mpiddp",
        f"bench scaling -H localhost:2 {TRAIN} --steps-per-epoch 2000 --out {{out}}",
        f"bench scaling -H localhost:1 --rounds 1 --seconds 1 {TRAIN} --steps-per-epoch 2000 --out {{out}}",
    ),
    "scale": Figure("benchmarks.scale", "", "--ranks 16"),
    "reference": Figure(
        "benchmarks.reference",
        "--rounds 1",
        "--rounds 1 --sizes 2 --links '100 Mbit/s' --cores 1 --steps 2 --batch-size 2",
    ),
    "random_faults": Figure(
        "benchmarks.random_faults",
        "--minutes 40 --seed 41",
        "--minutes 1 --seed 41 --only 33",
        is_in_all=False,
    ),
    "gpu": Figure("benchmarks.gpu", "", "--only start --limit 1s", is_in_all=False),
}


def caption(command: list[str]) -> str:
    """The commit, if there is one, the day, the processor and the command."""
    git = ["git", "-C", str(ROOT)]
    head = [*git, "rev-parse", "--short", "--verify", "--quiet", "HEAD"]
    commit = subprocess.run(head, stdout=subprocess.PIPE, text=True).stdout.strip() or "no commit"
    is_changed = subprocess.check_output([*git, "status", "--porcelain"], text=True) != ""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if "model name" in line
    ]
    cores = (
        f"{len(os.sched_getaffinity(0))} cores of {models[0].partition(': ')[2]}" if models else "?"
    )
    shown = shlex.join(["python", *command[1:]]).replace(sys.executable, "python")
    return f"*{commit}{' with changes' * is_changed}, {date.today()}, {cores}: `{shown}`.*"


def measure(name: str, out: Path, *, is_brief: bool) -> bool:
    """Run one, and append its table. Returns whether it has succeeded."""
    with TemporaryDirectory() as folder:
        command, began = FIGURES[name].command(folder, is_brief=is_brief), time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **ENV}, stdout=subprocess.PIPE, text=True
        )
    seconds = f"{time.monotonic() - began:.0f} s"
    print(
        f"{name}: {'measured' if done.returncode == 0 else 'FAILED'} in {seconds}", file=sys.stderr
    )
    if done.returncode == 0:
        with out.open("a", encoding="utf-8") as file:
            file.write(
                f"## {name}\n\n```text\n{done.stdout.rstrip()}\n```\n\n{caption(command)}\n\n"
            )
    return done.returncode == 0


def first_commands(rounds: int) -> str:
    """The seconds that the commands of a first hour take before they do anything, beside an empty Python."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "mpiddp --version": ["-m", "mpiddp", "--version"],
        "mpiddp launch --help": ["-m", "mpiddp", "launch", "--help"],
        "mpiddp launch --dry-run": [
            "-m",
            "mpiddp",
            "launch",
            "-H",
            "localhost:2",
            "--dry-run",
            "--",
            "true",
        ],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            began = time.monotonic()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            taken[name].append(time.monotonic() - began)
    rows = [[name, *(f"{f(s):.3f}" for f in (median, min, max))] for name, s in taken.items()]
    return markdown(("command", "median s", "lowest", "highest"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=str(__doc__).split("\n")[0]
    )
    names = [name for name, figure in FIGURES.items() if figure.is_in_all]
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=names, metavar="NAME,NAME"
    )
    parser.add_argument("--brief", action="store_true", help="try each one, in seconds")
    parser.add_argument("--out", type=Path, default=Path("figures.md"), metavar="FILE")
    parser.add_argument(
        "--first", type=int, metavar="ROUNDS", help="only print the table of `first`"
    )
    options = parser.parse_args()
    if options.first:
        print(first_commands(options.first))
        return 0
    if unknown := [name for name in options.only if name not in FIGURES]:
        parser.error(f"{unknown[0]} is not one of {', '.join(FIGURES)}")
    failed = [
        name for name in options.only if not measure(name, options.out, is_brief=options.brief)
    ]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
