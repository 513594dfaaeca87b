"""`mpiddp bench scaling`: images/s and efficiency by number of ranks.

Weak scaling keeps the batch of each rank, so twice the ranks ideally process twice the images. With
`--global-batch-size` the global batch stays (strong scaling). Each number of ranks is a separate job; the
jobs alternate in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, option, ratios, shown, title, turns, wholes
from mpiddp.bench.jobs import Jobs, progress
from mpiddp.errors import UserError


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] | None = option(
        "numbers of ranks (default: 1, 2, 4, … and all slots)", type=wholes(1)
    )
    rounds: int = option("rounds of all numbers of ranks", type=whole(1), default=3)
    steps: int = option("steps to time in each job", type=whole(4), default=20)


class Run(TypedDict):
    """One job, with the figures of a training: times are those of the slowest rank."""

    ranks: int
    num_hosts: int | None
    images_per_s: float
    step_time_p50_s: float
    step_time_p95_s: float
    settings: Result
    hosts: list[Result]


class Results(TypedDict):
    runs: list[Run]


def measure(options: Options, jobs: Jobs) -> Results:
    slots = jobs.slots
    powers = (2**power for power in range(slots.bit_length()) if 2**power < slots)
    sizes = options.ranks or (*powers, slots)
    if sizes[-1] > slots:
        raise UserError(f"--ranks {sizes[-1]} is more than the {slots} available slots.")
    runs = list[Run]()
    for number, ranks in turns(sizes, options.rounds):
        runs.append(jobs.run("scaling", options, ranks=ranks))
        speed = f"{runs[-1]['images_per_s']:,.0f} images/s"
        progress("scaling", ranks, number, options.rounds, speed)
    return {"runs": runs}


def table(results: Results) -> str:
    runs, rows = results["runs"], []
    sizes = sorted({run["ranks"] for run in runs})
    # The speed per rank, relative to that of the smallest job in the same round.
    ideal = [run["images_per_s"] / sizes[0] for run in runs if run["ranks"] == sizes[0]]
    for ranks in sizes:
        own = [run for run in runs if run["ranks"] == ranks]
        speeds = [run["images_per_s"] for run in own]
        rows.append(
            [
                str(ranks),
                str(own[0]["num_hosts"]),
                str(own[0]["settings"]["global_batch_size"]),
                shown(speeds, ",.0f"),
                shown(ratios([each / ranks for each in speeds], ideal), ".3f"),
                f"{1000 * median(run['step_time_p50_s'] for run in own):.1f}",
                f"{1000 * median(run['step_time_p95_s'] for run in own):.1f}",
            ]
        )
    head = ("ranks", "hosts", "global batch", "images/s", "efficiency", "step p50 ms", "p95 ms")
    return f"Scaling of {title(runs[-1]['settings'])}\n\n{aligned(head, rows)}"


# --- a rank ---


def rank(options: Options, training: list[str]) -> Result:
    """The figures of the training on so many ranks: a `Run`."""
    from mpiddp.bench.training import synthetic_job, time_runner
    from mpiddp.train.measure import STARTUP_STEPS

    with synthetic_job(training, STARTUP_STEPS + options.steps) as job:
        figures = time_runner(job)
    size = {"ranks": job.world.world_size, "num_hosts": job.world.num_nodes}
    return {**size, **figures, "settings": job.settings}
