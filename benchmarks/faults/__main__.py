"""Does every fault to real jobs on a cluster of three hosts and prints docs/faults.md's tables.

    python -m tests.mpis install
    python -m benchmarks.faults --rounds 5 --out faults.jsonl        # some 50 minutes on 2 cores
    python -m benchmarks.faults --rounds 1 --starters openmpi5 --only "a rank" --out some.jsonl

Each run is a line of --out as soon as it is over: the same command resumes where it was interrupted.
A run that did not come as far as its fault is reported on stderr, and is tried again then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import SubprocessError

from benchmarks.faults import cluster as on_cluster
from benchmarks.faults import saves, stops
from benchmarks.faults.table import Run, read, runs_table, tally_table, write
from benchmarks.harness import start
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.options import picked
from tests import cluster
from tests.cluster import Cluster

FAULTS = (*on_cluster.FAULTS, *stops.REQUESTS, *saves.DISK_FAULTS)


@dataclass(frozen=True)
class Planned:
    fault: str
    starter: str
    round: int
    measure: Callable[[Cluster], Run]
    ends_host: bool = False


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
                _do(each, hosts, options.out)
    finally:
        hosts.give_up()
    runs, tallies = read(options.out)
    print(runs_table(runs, [fault.name for fault in FAULTS]))
    print(f"\n{tally_table(tallies)}" if tallies else "")


class _Hosts:
    """A cluster, made anew after one of its hosts was killed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._stack.enter_context(cluster.up(3))
        return self._cluster

    def give_up(self) -> None:
        self._stack.close()
        self._cluster = None


def _do(planned: Planned, hosts: _Hosts, out: Path) -> None:
    what = f"{planned.fault}, {planned.starter}, round {planned.round}"
    try:
        run = planned.measure(hosts.get())
    except (TimeoutError, AssertionError, LookupError, SubprocessError) as error:
        print(f"{what}: no result: {error}", file=sys.stderr, flush=True)
        hosts.give_up()
        return
    write(out, run)
    if planned.ends_host:
        hosts.give_up()
    is_right = run.is_code_right and run.is_named and not run.orphans
    times = f"{run.detected_s} {run.ended_s} {run.resumed_s}"
    print(f"{what}: {'right' if is_right else 'WRONG'} {times}", file=sys.stderr, flush=True)
    if not is_right:
        print(run.said, file=sys.stderr, flush=True)


def _plan(rounds: int, starters: Sequence[str]) -> Iterator[Planned]:
    """Round by round, so that what else the machine does meets all faults alike."""
    for number in range(1, rounds + 1):
        for starter in starters:
            for fault in on_cluster.FAULTS:
                if starter in fault.starters:
                    run = partial(on_cluster.measure, fault, starter=starter, number=number)
                    yield Planned(fault.name, starter, number, run, fault.ends_host)
            if starter in on_cluster.OPEN_MPI:
                for request in stops.REQUESTS:
                    run = partial(stops.measure, request, starter=starter, number=number)
                    yield Planned(request.name, starter, number, run)
            if starter == starters[0]:  # a disk does not know of MPI
                for disk in saves.DISK_FAULTS:
                    run = partial(saves.measure, disk, starter=starter, number=number)
                    yield Planned(disk.name, starter, number, run)


def _options() -> Options:
    parser = OneSentenceParser(
        prog="python -m benchmarks.faults",
        description="Do every fault to real jobs on a cluster of three hosts.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    parser.add_argument(
        "--rounds", type=whole(0), default=5, metavar="R", help="0: print the table of --out"
    )
    parser.add_argument(
        "--starters",
        type=lambda text: tuple(text.split(",")),
        default=",".join(on_cluster.EVERY),
        metavar="MPI,MPI",
        help="which MPIs",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with it in their name")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="add a line of JSON for each run"
    )
    return picked(Options, parser.parse_args())


if __name__ == "__main__":
    start(main)
