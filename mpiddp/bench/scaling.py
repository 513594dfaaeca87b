"""`mpiddp bench scaling`: the steps/s of a script by its number of ranks.

    mpiddp bench scaling -H node1:8,node2:8 train.py --out {out}

Each number of ranks is a launch of its own, and the launches alternate in every round. The launcher counts
the steps of any script, for `mpiddp top`, and stops after some seconds of steps. If each rank has the same
batch at any number of ranks, the steps/s ideally stay the same.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from typing import Any, NamedTuple

from mpiddp.arguments import OUT, Option, duration, whole
from mpiddp.bench.main import BENCHMARKS
from mpiddp.bench.measured_jobs import (
    BenchJobFailed,
    Jobs,
    Result,
    aligned,
    new_parser,
    spread,
    started,
    values_of,
)
from mpiddp.errors import UserError, print_error
from mpiddp.launch.plan.entrypoint import read_job
from mpiddp.protocol.channel import VIEW_JOB
from mpiddp.text import counted
from mpiddp.watch.running_jobs import RunningJob, running_jobs

# The first steps allocate memory and select kernels, so they do not count.
WARMUP_STEPS = 3
_POLL_S = 0.5  # a rank reports its step twice a second


def _numbers(text: str) -> list[int]:
    return sorted({whole(1)(part) for part in text.split(",")})


OPTIONS = [
    Option(
        "--ranks",
        value="N,N",
        parse=_numbers,
        help="numbers of ranks (default: 1, 2, 4, … and all slots)",
    ),
    Option(
        "--rounds",
        value="N",
        parse=whole(1),
        default=3,
        help="rounds of all numbers of ranks (default: 3)",
    ),
    Option(
        "--seconds",
        value="TIME",
        parse=duration,
        default=20.0,
        help="time of steps in each job (default: 20 s)",
    ),
]


def main(argv: list[str]) -> int:
    """Run `mpiddp bench scaling ARGV`; see `mpiddp.bench.main`."""
    prog = "mpiddp bench scaling"
    parser, where = new_parser(prog, BENCHMARKS["scaling"], OPTIONS)
    parser.usage = f"{prog} [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    values = parser.parse_args(argv)
    script = read_job(values.module, values.script)
    jobs = Jobs(prog, argv, values, where, script)
    powers = (2**power for power in range(jobs.slots.bit_length()) if 2**power < jobs.slots)
    sizes = values.ranks or [*powers, jobs.slots]
    if sizes[-1] > jobs.slots:
        raise UserError(f"--ranks {sizes[-1]} is more than the {jobs.slots} available slots.")

    def measure() -> dict[str, list[Result]]:
        turns = [
            (number, ranks)
            for number in range(1, values.rounds + 1)
            # In every second round the order is reversed, because one job may leave work to the next.
            for ranks in (sizes if number % 2 else reversed(sizes))
        ]
        return {"runs": [run(ranks, number) for number, ranks in turns]}

    def run(ranks: int, number: int) -> Result:
        folder = jobs.out.absolute() / f"{ranks}_ranks_{number}"
        job = [argument.replace(OUT, str(folder)) for argument in script]
        result = count_steps([*jobs.command(ranks), *job], ranks, values.seconds, jobs.timeout_s)
        speed = f"{result['steps'] / result['seconds']:.3g} steps/s"
        of_rounds = f"{counted(ranks, 'rank')}, round {number} of {values.rounds}"
        print_error(f"scaling: {of_rounds}: {speed}")
        return result

    options = {**values_of(OPTIONS, values), "arguments": script}
    return jobs.report(options, measure, table)


class Reported(NamedTuple):
    """The newest step that a rank has reported."""

    step: int
    at: float  # by time.monotonic()


def count_steps(command: list[str], ranks: int, seconds: float, timeout_s: float) -> Result:
    """Start a script on so many ranks, count its steps for so many seconds or until its end, and stop it.

    The result has the steps of its slowest rank, and their seconds. Raises BenchJobFailed if it failed, or made too few steps within `timeout_s`.
    """
    first: dict[int, Reported] = {}
    last: dict[int, Reported] = {}
    hosts = set[str]()
    job: RunningJob | None = None
    until = time.monotonic() + timeout_s
    with started(command, subprocess.DEVNULL) as launcher:
        while launcher.poll() is None and time.monotonic() < until:
            job = job or next((job for job in running_jobs() if job.pid == launcher.pid), None)
            facts: dict[str, Any] = {}
            with contextlib.suppress(UserError):  # while the job starts, or if it has just ended
                facts = job.ask(VIEW_JOB) if job else {}
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
    # The steps of each rank, and their seconds.
    made = [
        (last[rank].step - began.step, last[rank].at - began.at) for rank, began in first.items()
    ]
    if not made or min(made)[0] < 1:
        newest = max((report.step for report in last.values()), default=0)
        raise BenchJobFailed(
            1,
            f"mpiddp: the launcher has counted {counted(newest, 'step')}, which is too few to measure. It "
            "counts the steps of torch's optimizers, or those of mpiddp.progress.",
        )
    steps, span_s = min(made, key=lambda rank: rank[0] / rank[1])
    return {"ranks": ranks, "hosts": len(hosts), "steps": steps, "seconds": span_s}


def table(results: dict[str, list[Result]]) -> str:
    speeds: dict[int, list[float]] = {}
    hosts: dict[int, int] = {}
    for run in results["runs"]:
        speeds.setdefault(run["ranks"], []).append(run["steps"] / run["seconds"])
        hosts[run["ranks"]] = run["hosts"]
    smallest = min(speeds)
    rows = []
    for ranks in sorted(speeds):
        # Those of one round were measured shortly after each other.
        ratios = [a / b for a, b in zip(speeds[ranks], speeds[smallest], strict=True)]
        cells = (str(ranks), str(hosts[ranks]), spread(speeds[ranks], ".3g"))
        rows.append([*cells, spread(ratios, ".3f")])
    title = (
        "Steps/s by number of ranks. Efficiency: relative to the smallest number in the same round"
    )
    return f"{title}\n\n{aligned(('ranks', 'hosts', 'steps/s', 'efficiency'), rows)}"
