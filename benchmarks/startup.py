"""Compare the run time of one command in this checkout and in another one, in alternation.

    python -m benchmarks.startup --before ../mpiddp-before
    python -m benchmarks.startup --before ../mpiddp-before --command "bench --help"

This checkout is measured twice in every round; the ratio of its two times is the noise.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import start_benchmark
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.compare import Command, alternate, comparison
from mpiddp.bench.jobs import Jobs
from mpiddp.bench.options import add_rounds
from mpiddp.errors import UserError
from tests.ranks import ROOT

BEFORE, NOW, AGAIN = "before", "now", "now again (noise)"


@dataclass(frozen=True)
class Options:
    before: str
    command: str
    rounds: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", required=True, metavar="PATH", help="the other checkout")
    parser.add_argument(
        "--command", default="launch --help", metavar="ARGS", help="arguments of mpiddp"
    )
    add_rounds(parser, default=30)


def measure(options: Options, jobs: Jobs) -> Results:
    before = Path(options.before).resolve()
    if not (before / "mpiddp" / "__init__.py").is_file():
        raise UserError(f"--before {options.before}: expected a checkout with the package mpiddp.")
    now = _command(ROOT, options.command)
    commands = {BEFORE: _command(before, options.command), NOW: now, AGAIN: now}
    found = alternate(commands, options.rounds, timeout_s=jobs.timeout_s)
    return {
        "wall_s": {name: [run.wall_s for run in runs] for name, runs in found.items()},
        "cpu_s": {name: [run.cpu_s for run in runs] for name, runs in found.items()},
    }


def _command(checkout: Path, arguments: str) -> Command:
    # The checkout may be read-only, so its bytecode goes to the user's cache.
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": _cache(checkout)}
    return Command([sys.executable, "-m", "mpiddp", *shlex.split(arguments)], checkout, env)


def _cache(checkout: Path) -> str:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(root, "mpiddp", "startup", *checkout.parts[1:]))


def table(results: Results) -> str:
    wall, cpu = (comparison(results[name], BEFORE) for name in ("wall_s", "cpu_s"))
    return f"Wall time:\n\n{wall}\n\nCPU time, user and system:\n\n{cpu}"


BENCHMARK = Benchmark(
    Options, _add_options, measure, table, takes_hosts=False, example="--before ../before"
)

if __name__ == "__main__":
    start_benchmark("startup", "the run time of a command in two checkouts", BENCHMARK)
