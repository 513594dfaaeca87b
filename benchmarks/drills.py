"""Drill the scripts of tests/support/drills.py, and print the tables of docs/evidence/drill.md.

    python -m tests.support.frameworks install
    python -m benchmarks.drills --out drills.jsonl                 # about 30 minutes on 2 idle cores
    python -m benchmarks.drills --only planted --out drills.jsonl  # the scripts with a planted defect

Each finished drill is appended to --out as one line. After an interruption the same command runs only what
is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import append_record, read_records, start
from mpiddp.arguments import DefaultsShown, OneSentenceParser
from mpiddp.bench.options import picked
from mpiddp.bench.report import markdown
from mpiddp.drill.faults import NAMES
from tests.support import frameworks
from tests.support.drills import DEFECTS, RIGHT, SCRIPT, command
from tests.support.own_script import example

EXAMPLE = "ddp_with_checkpoints.py"
PLANTED = "planted: "
ON_ONE_HOST = ",".join(name for name in NAMES if not name.startswith(("host-", "link")))


@dataclass(frozen=True)
class Drilled:
    """The results of `mpiddp drill --json`, and the minutes that it took."""

    name: str
    minutes: float
    results: list[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    only: str
    out: Path


@dataclass(frozen=True)
class _Drill:
    ranks: int
    faults: str
    job: tuple[str, ...]
    package: str = ""


def main() -> None:
    options = _options()
    known = {record["name"] for record in read_records(options.out)}
    with TemporaryDirectory() as folder:
        for name, each in _drills(Path(folder)):
            if options.only in name and name not in known:
                done = _run(name, each)
                append_record(options.out, asdict(done))
                print(f"{name}: {done.minutes:.1f} minutes", file=sys.stderr, flush=True)
    found = [Drilled(**record) for record in read_records(options.out)]
    print(right_table([each for each in found if not each.name.startswith(PLANTED)]))
    print(f"\n{planted_table([each for each in found if each.name.startswith(PLANTED)])}")


def _drills(folder: Path) -> Iterator[tuple[str, _Drill]]:
    for name, defect in DEFECTS.items():
        yield PLANTED + name, _Drill(defect.ranks, defect.fault, (SCRIPT, "{out}", name))
    for name, right in RIGHT.items():
        faults = ON_ONE_HOST if name == "mpiddp train" else right.faults
        ranks = 2 if name == "mpiddp train" else 1
        yield name, _Drill(ranks, faults, right.job, right.package)
    job = example(folder / "job")
    yield EXAMPLE, _Drill(2, ON_ONE_HOST, (str(job),))


def _run(name: str, each: _Drill) -> Drilled:
    options = ["-n", str(each.ranks), "--only", each.faults, "--seed", "3", "--json"]
    argv = [sys.executable, "-m", "mpiddp", "drill", *options, *command(*each.job)]
    env = frameworks.environment(each.package) if each.package else {}
    since = time.monotonic()
    ran = subprocess.run(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    assert ran.returncode in (0, 1), name
    return Drilled(name, (time.monotonic() - since) / 60, json.loads(ran.stdout))


def right_table(found: list[Drilled]) -> str:
    """One row for each script: the faults that it passed, and why it failed others."""
    rows = []
    for each in found:
        passed = [result["fault"] for result in each.results[1:] if result["passed"]]
        failed = [
            f"{result['fault']}: {result['cause']}"
            for result in each.results
            if result["passed"] is False
        ]
        rows.append([each.name, ", ".join(passed), "; ".join(failed) or "-", _minutes(each)])
    return markdown(["script", "passes", "fails", "minutes"], rows)


def planted_table(found: list[Drilled]) -> str:
    """One row for each defect: the fault that shows it, and the cause as the drill names it."""
    rows = []
    for each in found:
        result = each.results[-1]
        cause = result["cause"] if result["passed"] is False else "not found"
        rows.append([each.name.removeprefix(PLANTED), result["fault"], cause, _minutes(each)])
    return markdown(["planted defect", "fault", "what the drill says", "minutes"], rows)


def _minutes(each: Drilled) -> str:
    return f"{each.minutes:.1f}"


def _options() -> Options:
    parser = OneSentenceParser(
        prog="python -m benchmarks.drills",
        description="Drill scripts that are right and scripts with a planted defect.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="drill only scripts whose name contains TEXT"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="append one line of JSON per drill"
    )
    return picked(Options, parser.parse_args())


if __name__ == "__main__":
    start(main)
