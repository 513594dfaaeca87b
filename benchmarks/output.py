"""What arrives of the ranks' output, and what its way costs: the tables of docs/output.md.

    python -m tests.mpis install
    python -m benchmarks.output                    # about 3 minutes on 2 cores

The first table counts the lines that arrive whole if each is written in three parts, with the tags of the
MPI itself and with those of `mpiddp launch`. The second is about many lines that are written at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import OPENMPI5, mpirun_of, start_benchmark
from benchmarks.starters import STARTERS
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import counts
from mpiddp.bench.report import markdown
from mpiddp.launch.starters.detect import with_own_folder
from mpiddp.protocol.messages import OUTPUT_PROCESS
from tests.ranks import clean_env

PRINTING = str(Path(__file__).with_name("ranks") / "printing.py")
PARTS_RANKS, PARTS_LINES = 4, 100
TAGS = {
    OPENMPI5: ("--output", "tag"),
    "openmpi4": ("--tag-output",),
    "mpich": ("-prepend-rank",),
    "intelmpi": ("-l",),
}
_WHOLE = re.compile(rb"[^<>]*<(\d+) (\d+) x+>\r?")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...]
    lines: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=counts(1), default="8", metavar="8", help="numbers of ranks that print fast"
    )
    parser.add_argument("--lines", type=int, default=100_000, help="lines that each of them prints")


def measure(options: Options, jobs: Jobs) -> Results:
    parts = {starter: _count_parts(starter) for starter in STARTERS}
    fast = {ranks: _measure_fast(ranks, options.lines) for ranks in options.ranks}
    return {"parts": parts, "fast": fast, "lines": options.lines}


def _count_parts(starter: str) -> dict[str, int]:
    """The lines that arrive whole, of PARTS_RANKS ranks that write each in parts."""
    mpirun = mpirun_of(starter)
    many = ("-np", str(PARTS_RANKS))
    as_root = ("--allow-run-as-root", "--oversubscribe") if "openmpi" in starter else ()
    job = (PRINTING, "parts", str(PARTS_LINES))
    tagged = [mpirun, *as_root, *many, *TAGS[starter], sys.executable, *job]
    counted = {}
    for name, command in (("tagged", tagged), ("launch", _launch(PARTS_RANKS, mpirun, *job))):
        env = with_own_folder(Path(mpirun), clean_env({"MPIDDP_PREFIX": "always"}))
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        counted[name] = len(_whole_lines(done.stdout.split(b"\n")))
        note(f"output, {starter}, {name}: {counted[name]} of {PARTS_RANKS * PARTS_LINES} lines")
    return counted


def _launch(ranks: int, mpirun: str, *job: str) -> list[str]:
    where = ("-H", f"localhost:{ranks}", "--mpirun", mpirun)
    return [sys.executable, "-m", "mpiddp", "launch", *where, *job]


def _whole_lines(lines: list[bytes]) -> set[tuple[bytes, ...]]:
    return {found.groups() for line in lines if (found := _WHOLE.fullmatch(line))}


def _measure_fast(ranks: int, lines: int) -> dict[str, float]:
    """Lines, seconds, and what the launcher and the output processes have taken at their end."""
    command = _launch(ranks, mpirun_of(OPENMPI5), PRINTING, "fast", str(lines))
    arrived: set[tuple[bytes, ...]] = set()
    launcher_mb = 0.0
    processes: dict[int, tuple[float, float]] = {}  # pid: memory, CPU seconds
    since = 0.0
    with subprocess.Popen(command, env=clean_env(), stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        sampled_at = 0.0
        for line in launcher.stdout:
            since = since or time.monotonic()
            arrived |= _whole_lines([line.rstrip(b"\n")])
            if time.monotonic() - sampled_at > 0.5:
                sampled_at = time.monotonic()
                launcher_mb = max(launcher_mb, _peak_mb(launcher.pid))
                processes |= dict(_output_processes())
        seconds = time.monotonic() - since
    assert launcher.returncode == 0
    memory, cpu = zip(*processes.values(), strict=True)
    return {
        "sent": ranks * lines,
        "arrived": len(arrived),
        "seconds": seconds,
        "launcher_mb": launcher_mb,
        "process_mb": max(memory),
        "process_cpu_us_per_line": max(cpu) / lines * 1e6,
    }


def _peak_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _output_processes() -> Iterator[tuple[int, tuple[float, float]]]:
    """The output processes on this host: the memory that only they have, in MB, and their CPU seconds."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().strip() != OUTPUT_PROCESS:
                continue
            rollup = (entry / "smaps_rollup").read_text()
            ticks = (entry / "stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:  # it has ended
            continue
        private_kb = sum(map(int, re.findall(r"Private_\w+:\s+(\d+)", rollup)))
        yield int(entry.name), (private_kb / 1024, sum(map(int, ticks)) / _TICKS_PER_S)


def table(results: Results) -> str:
    sent = PARTS_RANKS * PARTS_LINES
    parts = [
        [STARTERS[starter], f"{sent - found['tagged']}", f"{sent - found['launch']}"]
        for starter, found in results["parts"].items()
    ]
    head = ["MPI", f"torn of {sent} lines, with the MPI's own tags", "with `mpiddp launch`"]
    fast = [
        [
            str(ranks),
            f"{found['sent']:,}",
            f"{found['sent'] - found['arrived']}",
            f"{found['seconds']:.1f} s",
            f"{found['launcher_mb']:.0f} MB",
            f"{found['process_mb']:.0f} MB",
            f"{found['process_cpu_us_per_line']:.1f} µs",
        ]
        for ranks, found in results["fast"].items()
    ]
    costs = ["ranks", "lines", "lost or torn", "time", "launcher's memory at most"]
    costs += ["memory of an output process", "its CPU time per line"]
    return f"{markdown(head, parts)}\n\n{markdown(costs, fast)}"


BENCHMARK = Benchmark(Options, _add_options, measure, table, takes_hosts=False)

if __name__ == "__main__":
    start_benchmark("output", "the output of the ranks", BENCHMARK)
