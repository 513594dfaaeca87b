"""The time from the kill of a rank to the first step of the restart, beside torchrun.

    python -m benchmarks.restart -H localhost:2 --rounds 10 --timeout 40

The last rank of a small training over gloo kills itself; rank 0 prints when. On one host torchrun restarts
the same script, in turn within every round. A round in which a launcher gives up, or does not end in time,
counts as failed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.harness import option, run_script
from benchmarks.start import Results, compared, in_turn, start_command
from mpiddp.arguments import whole
from mpiddp.bench.measured_jobs import Jobs

OPTIONS = {"mpiddp": ("--max-restarts=1",), "torchrun": ("--max-restarts=1", "--standalone")}


@dataclass(frozen=True)
class Options:
    rounds: int = option("rounds of both launchers", parse=whole(1), default=5)
    steps: int = option("steps before the kill", parse=whole(1), default=400)


def measure(options: Options, jobs: Jobs) -> Results:
    where, ranks, timeout_s = jobs.where, jobs.slots, jobs.timeout_s
    commands = {
        launcher: start_command(
            launcher, where, ranks, timeout_s, restarts, ("gloo", str(options.steps))
        )
        for launcher, restarts in OPTIONS.items()
    }
    if jobs.per_host < ranks:  # torchrun would start all of them on this host
        del commands["torchrun"]
    return {"starts": in_turn("restart", commands, ranks, options.rounds, timeout_s)}


def table(results: Results) -> str:
    title = "From the kill of a rank to the first optimizer step after it. CPU time is that of the whole job"
    return f"{title}\n\n{compared(results['starts'])}"


if __name__ == "__main__":
    sys.exit(
        run_script(
            "restart",
            "the time from the kill of a rank to the first optimizer step after it",
            least_ranks=2,
        )
    )
