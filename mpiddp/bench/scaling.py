"""`mpiddp bench scaling`: images/s and efficiency by number of ranks.

Weak scaling keeps the batch of each rank, so twice the ranks ideally process twice the images. With
`--global-batch-size` the global batch stays (strong scaling). Each number of ranks is a separate job; the
jobs alternate in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, Spread, aligned, percentile, ratios, shown, spread, turns
from mpiddp.bench.jobs import Jobs, progress
from mpiddp.bench.options import option, wholes
from mpiddp.errors import UserError
from mpiddp.train.options import parse as parse_training
from mpiddp.world import World


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] | None = option(
        "numbers of ranks (default: 1, 2, 4, … and all slots)", type=wholes(1)
    )
    rounds: int = option("rounds of all numbers of ranks", type=whole(1), default=3)
    steps: int = option("steps to time in each job", type=whole(1), default=20)
    warmup: int = option("steps before the timed ones", type=whole(0), default=5)


class Run(TypedDict):
    """One job."""

    images_per_s: float
    step_s: list[float]
    num_hosts: int | None
    global_batch_size: int
    settings: Result
    hosts: list[Result]


class Point(TypedDict):
    """All jobs of one number of ranks."""

    ranks: int
    num_hosts: int | None
    global_batch_size: int
    images_per_s: Spread
    efficiency: Spread
    step_s: list[list[float]]  # of each job


class Results(TypedDict):
    strong: bool
    settings: Result
    hosts: list[Result]
    points: list[Point]


def measure(options: Options, jobs: Jobs) -> Results:
    sizes = _sizes(options, jobs)
    runs: dict[int, list[Run]] = {ranks: [] for ranks in sizes}
    for number, ranks in turns(sizes, options.rounds):
        run: Run = jobs.run("scaling", options, ranks=ranks)
        runs[ranks].append(run)
        speed = f"{run['images_per_s']:,.0f} images/s"
        progress("scaling", ranks, number, options.rounds, speed)
    first, last = runs[sizes[0]], runs[sizes[-1]][-1]
    return {
        "strong": parse_training(list(jobs.training)).global_batch_size is not None,
        "settings": last["settings"],
        "hosts": last["hosts"],
        "points": [_point(ranks, runs[ranks], sizes[0], first) for ranks in sizes],
    }


def _point(ranks: int, runs: list[Run], base_ranks: int, base: list[Run]) -> Point:
    """The figures of one number of ranks.

    Efficiency is the speed per rank divided by the speed per rank of the smallest job in the same round.
    """
    speeds = [run["images_per_s"] for run in runs]
    bases = [run["images_per_s"] / base_ranks for run in base]
    return {
        "ranks": ranks,
        "num_hosts": runs[0]["num_hosts"],
        "global_batch_size": runs[0]["global_batch_size"],
        "images_per_s": spread(speeds),
        "efficiency": spread(ratios([speed / ranks for speed in speeds], bases)),
        "step_s": [run["step_s"] for run in runs],
    }


def _sizes(options: Options, jobs: Jobs) -> Sequence[int]:
    """The numbers of ranks to measure, in ascending order."""
    slots = jobs.slots
    powers = (2**power for power in range(slots.bit_length()) if 2**power < slots)
    sizes = options.ranks or (*powers, slots)
    if sizes[-1] > slots:
        raise UserError(f"--ranks {sizes[-1]} is more than the {slots} available slots.")
    return sizes


def table(results: Results) -> str:
    settings = results["settings"]
    kept = f"{settings['batch_size']} images per rank"
    if results["strong"]:
        kept = f"global batch {settings['global_batch_size']}"
    rows = []
    for point in results["points"]:
        times = [1000 * each for run in point["step_s"] for each in run]
        rows.append(
            [
                str(point["ranks"]),
                str(point["num_hosts"]),
                str(point["global_batch_size"]),
                shown(point["images_per_s"], ",.0f"),
                shown(point["efficiency"], ".3f"),
                *(f"{percentile(times, percent):.1f}" for percent in (50, 95)),
            ]
        )
    head = ("ranks", "hosts", "global batch", "images/s", "efficiency", "step p50 ms", "p95 ms")
    return (
        f"{'Strong' if results['strong'] else 'Weak'} scaling: {settings['arch']} on synthetic "
        f"{settings['dataset']}, {kept}, amp {settings['amp']}, {settings['backend']}\n\n"
        f"{aligned(head, rows)}"
    )


# --- a rank ---


def rank(world: World, options: Options, training: list[str]) -> Run:
    """Steps of the training, each timed on the device's own clock, on this rank."""
    from mpiddp.bench.training import build, open_source, settings, synthetic_job, synthetic_order
    from mpiddp.train.data import batches
    from mpiddp.train.measure import slowest
    from mpiddp.train.train import train_step

    with synthetic_job(world, training) as job:
        data = open_source(job)
        state = build(job, data)
        steps = list(synthetic_order(job, data, options.warmup + options.steps).steps(epoch=0))
        images = batches(data.train, steps, job.config, epoch=0)
        timer = state.timer
        timer.resume()
        for _ in steps:
            train_step(state, images, job.config.lr, job.config)
            timer.tick()
        own = timer.read()[options.warmup :]
        *seconds, total = slowest([*own, sum(own)], job.device)
    return {
        "images_per_s": job.config.global_batch_size * options.steps / total,
        "step_s": seconds,
        "num_hosts": job.coordinator.world.num_nodes,
        "global_batch_size": job.config.global_batch_size,
        "settings": settings(job),
        "hosts": job.hosts,
    }
