"""Inject every fault into real jobs on a cluster of three hosts, and print docs/evidence/faults.md's tables.

    python -m tests.support.mpis install
    python -m benchmarks.faults --rounds 5 --out faults.jsonl        # about 80 minutes on 2 cores
    python -m benchmarks.faults --rounds 1 --starters openmpi5 --only "a rank" --out some.jsonl

Each finished run is appended to --out as one line. After an interruption the same command runs only what
is missing. A run that ended before its fault is reported on stderr and not recorded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import SubprocessError

from benchmarks.faults import cluster as cluster_faults
from benchmarks.faults import saves, stops
from benchmarks.faults.table import Run, read, runs_table, tally_table, write
from benchmarks.harness import MPIS, start
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.options import picked
from tests.support import cluster
from tests.support.cluster import Cluster

FAULTS = (*cluster_faults.FAULTS, *stops.REQUESTS, *saves.DISK_FAULTS)


@dataclass(frozen=True)
class PlannedRun:
    fault: str
    starter: str
    round: int
    measure: Callable[[Cluster], Run]
    kills_host: bool = False


@dataclass(frozen=True)
class Options:
    rounds: int
    starters: tuple[str, ...]
    only: str
    out: Path


def main() -> None:
    options = _options()
    runs, tallies = read(options.out)
    for name, tally in saves.TALLIES.items():
        if options.only in name and options.rounds and all(name != each.fault for each in tallies):
            write(options.out, tally())
            print(name, file=sys.stderr, flush=True)
    known = {(run.fault, run.starter, run.round) for run in runs}
    hosts = _Hosts()
    try:
        for each in _plan(options.rounds, options.starters):
            if options.only in each.fault and (each.fault, each.starter, each.round) not in known:
                _measure(each, hosts, options.out)
    finally:
        hosts.close()
    runs, tallies = read(options.out)
    print(runs_table(runs, [fault.name for fault in FAULTS]))
    print(f"\n{tally_table(tallies)}" if tallies else "")


class _Hosts:
    """A cluster of three hosts. It is created again after `close`."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._stack.enter_context(cluster.up(3))
        return self._cluster

    def close(self) -> None:
        self._stack.close()
        self._cluster = None


def _measure(planned: PlannedRun, hosts: _Hosts, out: Path) -> None:
    label = f"{planned.fault}, {planned.starter}, round {planned.round}"
    try:
        run = planned.measure(hosts.get())
    except (TimeoutError, AssertionError, LookupError, SubprocessError) as error:
        print(f"{label}: no result: {error}", file=sys.stderr, flush=True)
        hosts.close()
        return
    write(out, run)
    if planned.kills_host:
        hosts.close()
    is_right = run.is_code_right and run.is_named and not run.orphans
    times = f"{run.detected_s} {run.ended_s} {run.resumed_s}"
    print(f"{label}: {'right' if is_right else 'WRONG'} {times}", file=sys.stderr, flush=True)
    if not is_right:
        print(run.said, file=sys.stderr, flush=True)


def _plan(rounds: int, starters: Sequence[str]) -> Iterator[PlannedRun]:
    """All faults of each round, so that other load on the machine affects all of them alike."""
    for number in range(1, rounds + 1):
        for starter in starters:
            for fault in cluster_faults.FAULTS:
                if starter in fault.starters:
                    run = partial(cluster_faults.measure, fault, starter=starter, number=number)
                    yield PlannedRun(fault.name, starter, number, run, fault.kills_host)
            if starter in cluster_faults.OPEN_MPI:
                for request in stops.REQUESTS:
                    run = partial(stops.measure, request, starter=starter, number=number)
                    yield PlannedRun(request.name, starter, number, run)
                for disk in saves.DISK_FAULTS:
                    run = partial(saves.measure, disk, starter=starter, number=number)
                    yield PlannedRun(disk.name, starter, number, run)


def _options() -> Options:
    parser = OneSentenceParser(
        prog="python -m benchmarks.faults",
        description="Inject every fault into real jobs on a cluster of three hosts.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    parser.add_argument(
        "--rounds",
        type=whole(0),
        default=5,
        metavar="R",
        help="runs of each fault; 0 prints the tables of --out",
    )
    parser.add_argument(
        "--starters",
        type=lambda text: tuple(text.split(",")),
        default=",".join(MPIS),
        metavar="MPI,MPI",
        help="MPIs to measure",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure only faults whose name contains TEXT"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="append one line of JSON per run"
    )
    return picked(Options, parser.parse_args())


if __name__ == "__main__":
    start(main)
