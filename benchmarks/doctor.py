"""What `mpiddp doctor` finds: faults injected one by one, runs on healthy hosts, and the time of many hosts.

    python -m benchmarks.doctor --healthy 50 --hosts 16 --out doctor.jsonl
    python -m benchmarks.doctor --only "slow" --healthy 0 --out some.jsonl

Each run is appended to --out as one line. After an interruption the same command runs only what is missing.
Needs root: it creates hosts in network namespaces. They share the cores of this machine.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import append_record, read_records, start
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.report import markdown
from mpiddp.errors import DONE
from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.doctor_faults import (
    FAULTS,
    HOSTS,
    OF_THIS_MACHINE,
    UNTRIED,
    doctor,
    prepared,
    unexplained,
)
from tests.support.ranks import ROOT

JOB = ("--script", "train.py", "--data", "data")
HEALTHY = "none"


@dataclass(frozen=True)
class Run:
    """One run of the doctor.

    said: its lines that are not ok. wrong: those that the fault does not explain.
    """

    fault: str
    hosts: int
    is_found: bool
    is_named: bool
    seconds: float
    code: int
    said: list[str]
    wrong: list[str]
    load: float


def main() -> None:
    parser = OneSentenceParser(
        prog="python -m benchmarks.doctor", description=__doc__, formatter_class=DefaultsShown
    )
    parser.add_argument("--healthy", type=whole(0), default=50, help="runs on healthy hosts")
    parser.add_argument(
        "--hosts", type=whole(0), default=16, help="one run on so many hosts; 0: none"
    )
    parser.add_argument("--only", default="", help="only faults with this in their name")
    parser.add_argument("--out", type=Path, default=Path("doctor.jsonl"), help="file of the runs")
    options = parser.parse_args()
    known = _read(options.out)
    left = [
        name for name in FAULTS if options.only in name and all(run.fault != name for run in known)
    ]
    healthy = options.healthy - sum(run.fault == HEALTHY and run.hosts == HOSTS for run in known)
    if left or healthy > 0:
        with prepared() as hosts:
            for name in left:
                _write(options.out, _with_fault(hosts, name))
            for _ in range(healthy):
                _write(options.out, _judged(HEALTHY, HOSTS, *doctor(hosts, *JOB)))
    if options.hosts and all(run.hosts != options.hosts for run in known):
        _write(options.out, _many(options.hosts))
    _print(_read(options.out))


def _with_fault(hosts: Cluster, name: str) -> Run:
    fault = FAULTS[name]
    with fault.inject(hosts):
        return _judged(name, HOSTS, *doctor(hosts, *JOB, names=fault.names))


def _judged(name: str, hosts: int, code: int, seconds: float, said: list[str]) -> Run:
    fault = FAULTS.get(name)
    patterns = [fault.says, *fault.also, *UNTRIED] if fault else []
    is_named = fault is not None and len(unexplained(said, [fault.says])) < len(said)
    wrong, load = unexplained(said, patterns), os.getloadavg()[0]
    return Run(name, hosts, bool(said), is_named, seconds, code, said, wrong, load)


def _many(count: int) -> Run:
    """The doctor on many hosts, the small job included."""
    with cluster.up(count) as hosts:
        names = ",".join(host.name for host in hosts.hosts)
        command = [sys.executable, "-m", "mpiddp", "doctor", "-H", names]
        began = time.monotonic()
        done = hosts["node0"].run(command, cwd=ROOT)
        seconds = time.monotonic() - began
    said = [
        line
        for line in done.stdout.splitlines()[1:]
        if not line.startswith("ok ") and not re.search(OF_THIS_MACHINE, line)
    ]
    return _judged(HEALTHY, count, done.returncode, seconds, said)


def _read(file: Path) -> list[Run]:
    return [Run(**record) for record in read_records(file)]


def _write(file: Path, run: Run) -> None:
    append_record(file, asdict(run))
    told = "found" if run.is_found else "nothing found"
    print(f"{run.fault}: {told}, {run.seconds:.1f} s", *run.wrong, sep="\n  ", file=sys.stderr)


def _print(runs: list[Run]) -> None:
    """The tables of docs/evidence/doctor.md."""
    rows = []
    for name in FAULTS:
        for run in (each for each in runs if each.fault == name):
            found, named = ("yes" if each else "**no**" for each in (run.is_found, run.is_named))
            rows.append([name, found, named, str(len(run.wrong)), f"{run.seconds:.1f}"])
    print(markdown(("fault", "found", "named right", "other lines", "seconds"), rows))
    right = sum(run.is_named for run in runs if run.fault in FAULTS)
    print(f"\n{right} of {len(rows)} are named right.\n")
    healthy = []
    for number in sorted({run.hosts for run in runs if run.fault == HEALTHY}):
        each = [run for run in runs if run.fault == HEALTHY and run.hosts == number]
        alarms = sum(bool(run.said) or run.code != DONE for run in each)
        times = [run.seconds for run in each]
        seconds = f"{median(times):.1f} ({max(times):.1f})"
        load = f"{median(run.load for run in each):.1f}"
        healthy.append([str(number), str(len(each)), str(alarms), seconds, load])
    print(markdown(("healthy hosts", "runs", "with a false alarm", "seconds", "load"), healthy))


if __name__ == "__main__":
    start(main)
