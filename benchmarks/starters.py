"""Compare every MPI with torchrun, and print the table of docs/evidence/mpi-implementations.md.

    python -m tests.support.mpis install
    python -m benchmarks.starters --rounds 5       # about 5 minutes on 2 cores; as root

torchrun is measured twice in every round; the ratio of its two times is the noise.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import OPENMPI5, mpirun_of, start_benchmark
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, launch_command, progress
from mpiddp.bench.launch import JOB, time_start, torchrun
from mpiddp.bench.options import add_rounds, counts
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios, turns
from tests.support import cluster
from tests.support.ranks import ROOT

LAUNCH = [sys.executable, "-m", "mpiddp", "launch"]
STARTERS = {
    OPENMPI5: "Open MPI 5.0.11",
    "openmpi4": "Open MPI 4.1.8",
    "mpich": "MPICH 5.0.2",
    "intelmpi": "Intel MPI 2021.18.1",
}
TORCHRUN = "torchrun"
NAMES = {**STARTERS, TORCHRUN: TORCHRUN, "torchrun again": "torchrun again (noise)"}


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...]
    rounds: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=counts(1), default="2,4", metavar="2,4", help="numbers of ranks"
    )
    add_rounds(parser, default=7)


def measure(options: Options, jobs: Jobs) -> Results:
    wall_s = {ranks: _wall_s(ranks, options.rounds, jobs) for ranks in options.ranks}
    with cluster.up(3) as hosts:
        placed = {starter: _placement(hosts, starter) for starter in STARTERS}
        failed = {starter: _failure(hosts, starter) for starter in STARTERS}
    return {"rounds": options.rounds, "wall_s": wall_s, "placement": placed, "failure": failed}


def _wall_s(ranks: int, rounds: int, jobs: Jobs) -> dict[str, list[float]]:
    """Seconds from the command to the end of the first all-reduce, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number, name in turns(list(NAMES), rounds, warmup=1):
        where = ("-H", f"localhost:{ranks}")
        command = (
            launch_command("--mpirun", mpirun_of(name), *where, *JOB)
            if name in STARTERS
            else torchrun(ranks)
        )
        start = time_start(command, ranks, jobs.timeout_s)
        if number > 0:
            seconds[name].append(start.wall_s)
            progress(f"starters, {name}", ranks, number, rounds, f"{start.wall_s:.2f} s")
    return seconds


def _placement(hosts: cluster.Cluster, starter: str) -> str:
    """Check the hosts of ranks 0 to 3 with unequal slots and the launching host in the middle."""
    show_rank_and_host = "import os, socket; print(os.environ['RANK'], socket.gethostname())"
    script = hosts.shared / "where.py"
    script.write_text(show_rank_and_host)
    done = hosts["node0"].run(
        [*LAUNCH, "--mpirun", mpirun_of(starter), "-H", "node1:2,node0:1,node2:1", str(script)],
        cwd=ROOT,
        timeout_s=60,
    )
    found = [line.split()[1] for line in sorted(done.stdout.split("\n")) if line]
    return "yes" if found == ["node1", "node1", "node0", "node2"] else f"no: {found}"


def _failure(hosts: cluster.Cluster, starter: str) -> str:
    """The launcher's exit code and time when a rank on another host raises while rank 0 sleeps."""
    script = hosts.shared / "fails.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    raise RuntimeError('on purpose')\n"
        "time.sleep(60)\n"
    )
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = hosts["node0"].run(
            [*LAUNCH, "--mpirun", mpirun_of(starter), "-H", "node0:1,node1:1", str(script)],
            cwd=ROOT,
            timeout_s=60,
        )
        seconds.append(time.monotonic() - start)
        line = "rank 1 on node1 failed first: RuntimeError: on purpose"
        assert done.stderr.count(line) == 1, done.stderr
    return f"{done.returncode}, after {median(seconds):.1f} s"


def table(results: Results) -> str:
    first, *others = results["wall_s"]
    head = ["launcher", "maps unequal slots", "a failing rank", f"first all-reduce, {first} ranks"]
    rows = []
    for name, shown in NAMES.items():
        row = [shown, results["placement"].get(name, "-"), results["failure"].get(name, "-")]
        for wall_s in results["wall_s"].values():
            ratio = median(ratios(wall_s[name], wall_s[TORCHRUN]))
            row.append(f"{median(wall_s[name]):.2f} s, {ratio:.2f} of torchrun's")
        rows.append(row)
    return (
        f"{markdown([*head, *(f'{ranks} ranks' for ranks in others)], rows)}\n\n"
        f"The table shows medians of {results['rounds']} alternating rounds on {os.cpu_count()} cores. Each "
        "ratio is the median of the rounds' own ratios."
    )


BENCHMARK = Benchmark(Options, _add_options, measure, table, takes_hosts=False)

if __name__ == "__main__":
    start_benchmark("starters", "every MPI and torchrun", BENCHMARK)
