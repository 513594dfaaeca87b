"""What arrives of the ranks' output, and what its way costs: the tables of docs/evidence/output.md.

    python -m tests.support.mpis install
    python -m benchmarks.output                    # about 3 minutes on 2 cores; as root, with Slurm, for srun

The first table counts the lines that arrive, and those that arrive torn, if each is written in three parts:
with the tags of the MPI itself, and with those of `mpiddp launch`. The second is about many lines that are
written at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import OPENMPI5, mpirun_of, start_benchmark
from benchmarks.starters import STARTERS
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.machine import peak_bytes
from mpiddp.bench.options import counts
from mpiddp.bench.report import markdown
from mpiddp.hosts.facts import with_own_folder
from mpiddp.protocol.messages import OUTPUT_PROCESS
from tests.support import cluster
from tests.support.cluster import needs, slurm
from tests.support.ranks import ROOT, clean_env

PRINTING = str(Path(__file__).with_name("ranks") / "printing.py")
PARTS_RANKS, PARTS_LINES = 4, 100
TAGS = {
    OPENMPI5: ("--output", "tag"),
    "openmpi4": ("--tag-output",),
    "mpich": ("-prepend-rank",),
    "intelmpi": ("-l",),
}
SRUN = "srun"
# Open MPI's tags contain "<stdout>".
_WHOLE = re.compile(rb"(?:[^<>]|<stdout>)*<(\d+) (\d+) x+>\r?")
_END = b"x>"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...]
    lines: int


@dataclass(frozen=True)
class Count:
    """The lines of a job: those that arrived, whole or torn, and those that are on a line of their own."""

    sent: int
    arrived: int
    torn: int

    @classmethod
    def of(cls, sent: int, lines: list[bytes]) -> Count:
        arrived = sum(line.count(_END) for line in lines)
        whole = {found.groups() for line in lines if (found := _WHOLE.fullmatch(line))}
        return cls(sent, arrived, arrived - len(whole))

    def __str__(self) -> str:
        return f"{self.sent} sent, {self.arrived} arrived, {self.torn} torn"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=counts(1), default="8", metavar="8", help="numbers of ranks that print fast"
    )
    parser.add_argument("--lines", type=int, default=100_000, help="lines that each of them prints")


def measure(options: Options, jobs: Jobs) -> Results:
    parts = {starter: _count_parts(starter) for starter in STARTERS}
    if reason := needs.why_no_slurm():
        note(f"output, without {SRUN}: {reason}")
    else:
        parts[SRUN] = _count_parts_of_srun()
    fast = {
        f"{starter} {ranks}": _measure_fast(starter, ranks, options.lines)
        for ranks in options.ranks
        for starter in STARTERS
    }
    return {"parts": parts, "fast": fast}


def _count_parts(starter: str) -> Results:
    """The lines of PARTS_RANKS ranks that write each in parts."""
    mpirun = mpirun_of(starter)
    as_root = ("--allow-run-as-root", "--oversubscribe") if "openmpi" in starter else ()
    job = (PRINTING, "parts", str(PARTS_LINES))
    tagged = [mpirun, *as_root, "-np", str(PARTS_RANKS), *TAGS[starter], sys.executable, *job]
    counted = {}
    for name, command in (("tagged", tagged), ("launch", _launch(PARTS_RANKS, mpirun, *job))):
        env = with_own_folder(Path(mpirun), clean_env({"MPIDDP_PREFIX": "always"}))
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        counted[name] = _counted(starter, name, done.stdout)
    return counted


def _count_parts_of_srun() -> Results:
    """The same with srun, by itself and inside a batch job, on one host of a test cluster."""
    job = [PRINTING, "parts", str(PARTS_LINES)]
    tasks = f"--ntasks={PARTS_RANKS}"
    tagged = ["srun", "-N1", tasks, "--mpi=none", "--label", sys.executable, *job]
    launch = [sys.executable, "-m", "mpiddp", "launch", "--prefix", "always", "--log-ranks", "all"]
    with cluster.up(1) as hosts, slurm.up(hosts) as batch:
        text = hosts["node0"].run(tagged, cwd=ROOT, check=True).stdout
        counted = {"tagged": _counted(SRUN, "tagged", text.encode())}
        script = f"#!/bin/sh\n{shlex.join([*launch, *job])}\n"
        done = batch.sbatch(script, "-N1", tasks, cwd=ROOT)
        assert done.returncode == 0, done.stdout
        return counted | {"launch": _counted(SRUN, "launch", done.stdout.encode())}


def _counted(starter: str, name: str, text: bytes) -> dict[str, int]:
    count = Count.of(PARTS_RANKS * PARTS_LINES, text.split(b"\n"))
    note(f"output, {starter}, {name}: {count}")
    return asdict(count)


def _launch(ranks: int, mpirun: str, *job: str) -> list[str]:
    where = ("-H", f"localhost:{ranks}", "--mpirun", mpirun)
    return [sys.executable, "-m", "mpiddp", "launch", *where, *job]


def _measure_fast(starter: str, ranks: int, lines: int) -> Results:
    """Lines, seconds, and what the launcher and the output processes have taken at their end."""
    command = _launch(ranks, mpirun_of(starter), PRINTING, "fast", str(lines))
    arrived: list[bytes] = []
    launcher_mb = since = sampled_at = 0.0
    processes: dict[int, tuple[float, float]] = {}  # pid: memory, CPU seconds
    with subprocess.Popen(command, env=clean_env(), stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            since = since or time.monotonic()
            arrived.append(line.rstrip(b"\n"))
            if time.monotonic() - sampled_at > 0.5:
                sampled_at = time.monotonic()
                launcher_mb = max(launcher_mb, peak_bytes(launcher.pid) / 2**20)
                processes |= dict(_output_processes())
        seconds = time.monotonic() - since
        os.waitid(
            os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT
        )  # its times are there until it is reaped
        launcher_cpu_s = _cpu_s(Path(f"/proc/{launcher.pid}"))
    assert launcher.returncode == 0
    count = Count.of(ranks * lines, arrived)
    note(f"output, {starter}, {ranks} ranks: {count}")
    memory, cpu_s = zip(*processes.values(), strict=True)
    return {
        "starter": starter,
        "ranks": ranks,
        **asdict(count),
        "seconds": seconds,
        "launcher_mb": launcher_mb,
        "launcher_cpu_s": launcher_cpu_s,
        "process_mb": max(memory),
        "process_cpu_us_per_line": max(cpu_s) / lines * 1e6,
    }


def _cpu_s(process: Path) -> float:
    """The user and system time of a process in /proc."""
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / _TICKS_PER_S


def _output_processes() -> Iterator[tuple[int, tuple[float, float]]]:
    """The output processes on this host: the memory that only they have, in MB, and their CPU seconds."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().strip() != OUTPUT_PROCESS:
                continue
            rollup = (entry / "smaps_rollup").read_text()
            cpu_s = _cpu_s(entry)
        except OSError:  # it has ended
            continue
        private_kb = sum(map(int, re.findall(r"Private_\w+:\s+(\d+)", rollup)))
        yield int(entry.name), (private_kb / 1024, cpu_s)


def table(results: Results) -> str:
    names = {**STARTERS, SRUN: "Slurm's srun"}
    parts = [
        [names[starter], f"{found['tagged']['sent']}"]
        + [f"{found[how][key]}" for how in ("tagged", "launch") for key in ("arrived", "torn")]
        for starter, found in results["parts"].items()
    ]
    head = ["MPI", "lines sent", "arrived, with its own tags", "torn"]
    head += ["arrived, with `mpiddp launch`", "torn"]
    fast = [
        [
            names[found["starter"]],
            f"{found['ranks']}",
            *(f"{found[key]:,}" for key in ("sent", "arrived", "torn")),
            f"{found['seconds']:.1f} s",
            f"{found['launcher_mb']:.0f} MB",
            f"{found['launcher_cpu_s']:.1f} s",
            f"{found['process_mb']:.0f} MB",
            f"{found['process_cpu_us_per_line']:.1f} µs",
        ]
        for found in results["fast"].values()
    ]
    costs = ["MPI", "ranks", "lines sent", "arrived", "torn", "time", "launcher's memory at most"]
    costs += ["its CPU time", "memory of an output process", "its CPU time per line"]
    return f"{markdown(head, parts)}\n\n{markdown(costs, fast)}"


BENCHMARK = Benchmark(Options, _add_options, measure, table, takes_hosts=False)

if __name__ == "__main__":
    start_benchmark("output", "the output of the ranks", BENCHMARK)
