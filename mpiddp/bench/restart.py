"""`mpiddp bench restart`: the time from the kill of a rank to the first all-reduce of the restart.

The last rank of a small training over gloo kills itself; rank 0 prints when. On one host torchrun restarts
the same script, in turn within every round. A round in which a launcher gives up, or does not end in time,
counts as failed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import aligned, percentile, shown, spread, turns
from mpiddp.bench.jobs import BenchJobFailed, Jobs, launch_command, progress, time_command
from mpiddp.bench.options import option
from mpiddp.bench.start import SCRIPT
from mpiddp.errors import UserError

JOB = (SCRIPT, "gloo", "200")  # steps before the kill
_TIMES = re.compile(r"killed at ([\d.]+).*first all-reduce of \d+ ranks at ([\d.]+)", re.DOTALL)


@dataclass(frozen=True)
class Options:
    rounds: int = option("rounds of both launchers", type=whole(1), default=5)


class Results(TypedDict):
    ranks: int
    restart_s: dict[str, list[float | None]]  # of each launcher; None for a round that failed


def measure(options: Options, jobs: Jobs) -> Results:
    if jobs.slots < 2:
        raise UserError("a restart needs at least 2 ranks. Example: -H localhost:2")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for both
    limit = f"{jobs.timeout_s:.0f}"
    command = [*launch_command(*jobs.where, "--timeout", limit), "-n", str(jobs.slots)]
    commands = {"mpiddp": [*command, "--max-restarts", "1", *JOB]}
    if jobs.per_host == jobs.slots:  # one host, which torchrun has as well
        options_of_torchrun = [f"--nproc-per-node={jobs.slots}", "--max-restarts=1", "--standalone"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options_of_torchrun]
        commands["torchrun"] = [*torchrun, *JOB]
    seconds: dict[str, list[float | None]] = {launcher: [] for launcher in commands}
    for number, launcher in turns([*commands], options.rounds, warmup=1):
        taken = time_restart(commands[launcher], jobs.timeout_s)
        if number > 0:
            seconds[launcher].append(taken)
            measured = "failed" if taken is None else f"{taken:.2f} s"
            progress(f"restart, {launcher}", jobs.slots, number, options.rounds, measured)
    return {"ranks": jobs.slots, "restart_s": seconds}


def time_restart(command: Sequence[str], timeout_s: float) -> float | None:
    """The seconds from the kill to the first all-reduce of the restart; None if the job failed."""
    try:
        finished = time_command(command, timeout_s=timeout_s)
    except BenchJobFailed:
        return None
    times = _TIMES.search("\n".join(finished.lines))
    return float(times[2]) - float(times[1]) if times else None


def table(results: Results) -> str:
    rows, middle = [], dict[str, float]()
    for launcher, rounds in results["restart_s"].items():
        taken = [each for each in rounds if each is not None]
        middle |= {launcher: percentile(taken, 50)} if taken else {}
        cells = [launcher, f"{len(taken)} of {len(rounds)}"]
        rows.append([*cells, shown(spread(taken), ".2f") if taken else "-"])
    for row in rows:
        both = {row[0], "torchrun"} <= middle.keys()
        row.append(f"{middle[row[0]] / middle['torchrun']:.2f}" if both else "-")
    head = ("launcher", "restarted", "seconds", "of torchrun's")
    title = (
        f"Time from the kill of one of {results['ranks']} ranks to the first all-reduce after it"
    )
    return f"{title}\n\n{aligned(head, rows)}"
