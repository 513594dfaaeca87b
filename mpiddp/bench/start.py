"""`mpiddp bench start`: the time from the command to the end of the first all-reduce, beside torchrun.

Both launchers start the same env:// script on this machine over gloo, in turn within every round. The first
round only warms the page cache. CPU time counts every process of the job. Memory is the peak memory of the
resident process, the launcher or torchrun's agent, at the end of the all-reduce.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mpiddp.arguments import whole, wholes
from mpiddp.bench.figures import Result, aligned, ratios, shown, spread, turns
from mpiddp.bench.jobs import BenchJobFailed, Jobs, launch_command, note, progress, time_command
from mpiddp.train.option_parser import option

JOB = (str(Path(__file__).with_name("ranks") / "first_all_reduce.py"), "gloo")
LAUNCHERS = ("mpiddp", "torchrun")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = option(
        "start", "numbers of ranks", type=wholes(1), default="2,4,8,16,32", metavar="2,4"
    )
    rounds: int = option(
        "start", "rounds; each launcher starts once in each", type=whole(1), default=5
    )


@dataclass(frozen=True)
class Start:
    """One job: seconds to its first all-reduce, CPU seconds of all its processes, peak memory in MB.

    `resident_mb` is the memory of the command itself, `child_mb` that of its first child, which is mpirun.
    """

    wall_s: float
    cpu_s: float
    resident_mb: float
    child_mb: float


def measure(options: Options, jobs: Jobs) -> Result:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be more ranks than GPUs
    points: list[Result] = []
    for ranks in options.ranks:
        try:
            points.append(_point(ranks, options.rounds, jobs.timeout_s))
        except BenchJobFailed as failure:
            if not points:
                raise
            note(f"start: a job of {ranks} ranks failed and is left out: {failure}")
    return {"points": points}


def _point(ranks: int, rounds: int, timeout_s: float) -> Result:
    starts: dict[str, list[Start]] = {launcher: [] for launcher in LAUNCHERS}
    for number, launcher in turns(LAUNCHERS, rounds, warmup=1):
        start = time_start(launcher, ranks, timeout_s)
        if number > 0:
            starts[launcher].append(start)
            progress(f"start, {launcher}", ranks, number, rounds, f"{start.wall_s:.2f} s")
    found: Result = {"ranks": ranks}
    seconds = {
        name: {each: [getattr(start, name) for start in starts[each]] for each in LAUNCHERS}
        for name in ("wall_s", "cpu_s")
    }
    for launcher in LAUNCHERS:
        found[launcher] = {
            **{name: spread(values[launcher]) for name, values in seconds.items()},
            "resident_mb": max(start.resident_mb for start in starts[launcher]),
        }
    # The children of torchrun are the ranks.
    found["mpiddp"]["child_mb"] = max(start.child_mb for start in starts["mpiddp"])
    for name, values in seconds.items():
        found[f"{name}_ratio"] = spread(ratios(values["mpiddp"], values["torchrun"]))
    return found


def time_start(launcher: str, ranks: int, timeout_s: float) -> Start:
    """Start JOB. Its rank 0 prints a line after its first all-reduce.

    Raises:
        BenchJobFailed: it did not succeed within `timeout_s`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *JOB]
    if launcher == "mpiddp":
        limit = f"{timeout_s:.0f}"
        command = [*launch_command("-H", f"localhost:{ranks}", "--timeout", limit), *JOB]
    seen: list[tuple[float, int, int]] = []

    def watch(pid: int, line: str) -> None:
        if match := re.search(rf"{ranks} ranks at ([\d.]+)", line):
            # Its later children are those of ranks, which it adopts.
            of_child = _peak_bytes(_first_child(pid))
            seen.append((float(match[1]), _peak_bytes(pid), of_child))

    finished = time_command(command, timeout_s=timeout_s, on_line=watch)
    [(at, own, of_child)] = seen
    return Start(at - finished.started_at, finished.cpu_s, own / 1e6, of_child / 1e6)


def _peak_bytes(pid: int) -> int:
    """The peak memory of a process so far; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _first_child(pid: int) -> int:
    """The oldest child of the first thread of a process; 0 if it has none, or has ended."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[0]) if found else 0


def table(results: Result) -> str:
    head = ("ranks", "launcher", "wall s", "of torchrun's", "CPU s", "of torchrun's", "MB")
    rows = []
    for point in results["points"]:
        for launcher in LAUNCHERS:
            each, is_ours = point[launcher], launcher == "mpiddp"
            of_theirs = [
                f"{point[f'{name}_ratio']['median']:.2f}" if is_ours else "1.00"
                for name in ("wall_s", "cpu_s")
            ]
            memory = f"{each['resident_mb']:.1f}"
            if is_ours:
                memory += f" + {each['child_mb']:.1f} of mpirun"
            wall, cpu = shown(each["wall_s"], ".2f"), shown(each["cpu_s"], ".2f")
            ranks = str(point["ranks"])
            rows.append([ranks, launcher, wall, of_theirs[0], cpu, of_theirs[1], memory])
    return (
        "Time from the command to the end of the first all-reduce; MB is the peak memory of the "
        f"launcher or torchrun's agent\n\n{aligned(head, rows)}"
    )
