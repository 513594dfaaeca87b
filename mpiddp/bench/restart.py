"""`mpiddp bench restart`: the time from the kill of a rank to the first all-reduce of the restart.

The last rank of a small training over gloo kills itself; rank 0 prints when. On one host torchrun restarts
the same script, in turn within every round. A round in which a launcher gives up, or does not end in time,
counts as failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from mpiddp.arguments import whole
from mpiddp.bench.figures import option
from mpiddp.bench.jobs import BenchJobFailed, Jobs, time_command
from mpiddp.bench.start import (
    LAUNCHERS,
    SCRIPT,
    Results,
    compared,
    in_turn,
    launcher_command,
)

JOB = (SCRIPT, "gloo", "200")  # steps before the kill
_TIMES = re.compile(r"killed at ([\d.]+).*first all-reduce of \d+ ranks at ([\d.]+)", re.DOTALL)


@dataclass(frozen=True)
class Options:
    rounds: int = option("rounds of both launchers", type=whole(1), default=5)


def measure(options: Options, jobs: Jobs) -> Results:
    launchers = LAUNCHERS if jobs.per_host == jobs.slots else ("mpiddp",)  # one host, or several
    time_one = partial(time_restart, jobs=jobs)
    return {"starts": in_turn("restart", launchers, jobs.slots, options.rounds, time_one)}


def time_restart(launcher: str, jobs: Jobs) -> tuple[float, float] | None:
    """From the kill to the first all-reduce of the restart; None if the job failed."""
    command = launcher_command(launcher, jobs.where, jobs.slots, jobs.timeout_s)
    command += ["--max-restarts=1", *(["--standalone"] if launcher == "torchrun" else [])]
    try:
        done = time_command([*command, *JOB], timeout_s=jobs.timeout_s)
    except BenchJobFailed:
        return None
    times = _TIMES.search("\n".join(done.lines))
    return (float(times[2]) - float(times[1]), done.cpu_s) if times else None


def table(results: Results) -> str:
    title = "From the kill of a rank to the first all-reduce after it. CPU time is that of the whole job"
    return f"{title}\n\n{compared(results['starts'])}"
