"""`mpiddp bench scaling`: the steps/s of a script by its number of ranks.

    mpiddp bench scaling -H node1:8,node2:8 train.py --out {out}

Each number of ranks is a launch of its own, and the launches alternate in every round. The launcher counts
the steps of any script, for `mpiddp top`, and stops after some seconds of steps. If each rank has the same
batch at any number of ranks, the steps/s ideally stay the same.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from mpiddp.arguments import OUT, duration, whole
from mpiddp.bench.figures import aligned, option, ratios, spread, turns, wholes
from mpiddp.bench.measured_jobs import BenchJobFailed, Jobs, progress, started, text_of
from mpiddp.errors import DONE, UserError
from mpiddp.protocol.channel import VIEW_JOB
from mpiddp.text import counted
from mpiddp.watch.running_jobs import RunningJob, running_jobs

# The first steps allocate memory and select kernels, so they do not count.
WARMUP_STEPS = 3
_POLL_S = 0.5  # a rank reports its step twice a second
_TITLE = "Steps/s by number of ranks. Efficiency: relative to the smallest number in the same round"


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] | None = option(
        "numbers of ranks (default: 1, 2, 4, … and all slots)", type=wholes(1)
    )
    rounds: int = option("rounds of all numbers of ranks", type=whole(1), default=3)
    seconds: float = option("time of the steps to measure in each job", type=duration, default=20.0)


class ScalingRun(TypedDict):
    """One launch: the steps of its slowest rank in so many seconds."""

    ranks: int
    hosts: int
    steps: int
    seconds: float


class Results(TypedDict):
    runs: list[ScalingRun]


def measure(options: Options, jobs: Jobs) -> Results:
    slots = jobs.slots
    powers = (2**power for power in range(slots.bit_length()) if 2**power < slots)
    sizes = options.ranks or (*powers, slots)
    if sizes[-1] > slots:
        raise UserError(f"--ranks {sizes[-1]} is more than the {slots} available slots.")
    runs = list[ScalingRun]()
    for number, ranks in turns(sizes, options.rounds):
        folder = jobs.out.absolute() / f"{ranks}_ranks_{number}"
        script = [argument.replace(OUT, str(folder)) for argument in jobs.arguments]
        run = count_steps([*jobs.command(ranks), *script], ranks, options.seconds, jobs.timeout_s)
        speed = f"{run['steps'] / run['seconds']:.3g} steps/s"
        progress("scaling", ranks, number, options.rounds, speed)
        runs.append(run)
    return {"runs": runs}


class Reported(NamedTuple):
    """The newest step that a rank has reported, and when: by time.monotonic()."""

    step: int
    at: float


def count_steps(command: list[str], ranks: int, seconds: float, timeout_s: float) -> ScalingRun:
    """Start a script on so many ranks, count its steps for so many seconds or until its end, and stop it.

    Raises:
        BenchJobFailed: it failed, or made too few steps within `timeout_s`.
    """
    first: dict[int, Reported] = {}
    last: dict[int, Reported] = {}
    hosts = set[str]()
    job: RunningJob | None = None
    until = time.monotonic() + timeout_s
    with started(command, subprocess.DEVNULL) as (launcher, stderr):
        while launcher.poll() is None and time.monotonic() < until:
            job = job or next((job for job in running_jobs() if job.pid == launcher.pid), None)
            facts = _facts_of(job)
            now = time.monotonic()
            reports = {
                rank["rank"]: Reported(rank["step"], now - rank["ago_s"])
                for rank in facts.get("ranks", ())
                if "step" in rank
            }
            if len(reports) == ranks:
                last, hosts = reports, {rank["host"] for rank in facts["ranks"]}
            if not first and last and min(report.step for report in last.values()) >= WARMUP_STEPS:
                first = last
            if first and min(last[rank].at - first[rank].at for rank in first) >= seconds:
                break
            time.sleep(_POLL_S)
        if launcher.poll() not in (None, DONE):
            raise BenchJobFailed(launcher.returncode, text_of(stderr))
    steps = {rank: last[rank].step - first[rank].step for rank in first}
    if not steps or min(steps.values()) < 1:
        newest = max((report.step for report in last.values()), default=0)
        raise BenchJobFailed(
            1,
            f"mpiddp: the launcher has counted {counted(newest, 'step')}, which is too few to measure. It "
            "counts the steps of torch's optimizers, or those of mpiddp.progress.",
        )
    span_s = {rank: last[rank].at - first[rank].at for rank in first}
    slowest = min(first, key=lambda rank: steps[rank] / span_s[rank])
    return {
        "ranks": ranks,
        "hosts": len(hosts),
        "steps": steps[slowest],
        "seconds": span_s[slowest],
    }


def _facts_of(job: RunningJob | None) -> dict[str, Any]:
    """The launcher's status of its job; {} while it starts, or if it has just ended."""
    with contextlib.suppress(UserError):
        return job.ask(VIEW_JOB) if job else {}
    return {}


def table(results: Results) -> str:
    speeds: dict[int, list[float]] = {}
    hosts: dict[int, int] = {}
    for run in results["runs"]:
        speeds.setdefault(run["ranks"], []).append(run["steps"] / run["seconds"])
        hosts[run["ranks"]] = run["hosts"]
    smallest = min(speeds)
    rows = [
        [
            str(ranks),
            str(hosts[ranks]),
            spread(speeds[ranks], ".3g"),
            spread(ratios(speeds[ranks], speeds[smallest]), ".3f"),
        ]
        for ranks in sorted(speeds)
    ]
    return f"{_TITLE}\n\n{aligned(('ranks', 'hosts', 'steps/s', 'efficiency'), rows)}"
