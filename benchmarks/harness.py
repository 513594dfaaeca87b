"""Shared by the scripts of this folder: their entry point, files of results, and the mpirun of each MPI."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mpiddp.bench.benchmark import Benchmark, Options
from mpiddp.bench.jobs import BenchJobFailed
from mpiddp.bench.run import run_benchmark
from mpiddp.errors import BAD_INPUT, DONE, INTERRUPTED, UserError
from tests.support.mpis import PACKAGES, find
from tests.support.ranks import ROOT, find_mpirun

OPENMPI5 = "openmpi5"  # installed in this environment; tests.support.mpis installs the others
MPIS = (OPENMPI5, *PACKAGES)
# Of jobs: they import this checkout, and a rank has one thread, as under torchrun.
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main function and exit. Errors are printed as one sentence, as `mpiddp` does."""
    os.environ.update(ENV)
    try:
        sys.exit(main() or DONE)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)
    except BenchJobFailed as failure:
        print(f"a job failed with exit code {failure.code}:\n{failure}", file=sys.stderr)
        sys.exit(failure.code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def start_benchmark(name: str, purpose: str, benchmark: Benchmark[Options]) -> NoReturn:
    """Run `python -m benchmarks.NAME` as `mpiddp bench` runs its benchmarks."""
    prog = f"python -m benchmarks.{name}"
    start(lambda: run_benchmark(prog, purpose, benchmark, sys.argv[1:]))


def append_record(file: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON."""
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records in the complete lines of a file; [] without a file."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def mpirun_of(starter: str) -> str:
    """The path of the mpirun of this MPI.

    Raises:
        UserError: it is not installed.
    """
    path: str | Path | None = find_mpirun() if starter == OPENMPI5 else find(starter)
    if path is None:
        raise UserError(f"{starter} is not installed. Run: python -m tests.support.mpis install")
    return str(path)
