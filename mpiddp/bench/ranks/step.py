"""A rank of `mpiddp bench step`: the runner's loop and a bare loop, in blocks that alternate within one job.

Other work of the machines affects both equally. The loops start each block with a fresh model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from mpiddp.bench.figures import Result, turns
from mpiddp.bench.ranks.training import (
    EXCHANGE_TIMEOUT_S,
    Job,
    bare_step,
    build,
    open_source,
    settings,
    synthetic_job,
    synthetic_order,
)
from mpiddp.bench.step import BARE, BARE_AGAIN, RUNNER, Options
from mpiddp.train.data import Batch, Data, batches
from mpiddp.train.measure import PHASES, STARTUP_STEPS, StepTimer, slowest
from mpiddp.train.order import Order
from mpiddp.train.records import Records
from mpiddp.train.run import open_checkpoints
from mpiddp.train.train import fit, learning_rate
from mpiddp.world import World


def rank(world: World, options: Options, training: list[str]) -> Result:
    count = STARTUP_STEPS + options.steps
    with synthetic_job(world, [*training, "--grad-accum-steps", "1"]) as job:
        data = open_source(job)
        order = synthetic_order(job, data, count)
        tensors = list(batches(data.train, order.steps(epoch=0), job.config, epoch=0))
        summaries: list[dict[str, Any]] = []
        with _scratch_folder(job) as folder:
            blocks: dict[str, Callable[[Path], float]] = {
                RUNNER: lambda out: _time_runner(job, data, order, out, summaries),
                BARE: lambda _: _time_bare_loop(job, data, tensors, order),
                BARE_AGAIN: lambda _: _time_bare_loop(job, data, tensors, order),
            }
            seconds: dict[str, list[float]] = {name: [] for name in blocks}
            for number, name in turns(list(blocks), options.rounds):
                seconds[name].append(blocks[name](folder / str(number)))
    mean_phases = [
        {name: each["phases"][name] / each["steps"] for name in PHASES} for each in summaries
    ]
    found = {"settings": settings(job), "hosts": job.hosts}
    return {"loops": seconds, "phases": mean_phases, **found}


def _time_runner(
    job: Job, data: Data, order: Order, out: Path, summaries: list[dict[str, Any]]
) -> float:
    """The seconds of a step as `mpiddp train` itself measures them."""
    config = dataclasses.replace(job.config, epochs=1, out=str(out))
    state = build(job, data)
    with open_checkpoints(out, config) as checkpoints:
        checkpoints.resume()
        world = job.coordinator.world
        records = Records(config, world, data, state, order.steps_per_epoch)
        fit(config, data, order, state, checkpoints, step=0, hooks=[records])
    summary = records.summary
    summaries.append(summary)
    return float(summary["global_batch_size"] / summary["images_per_s"])


def _time_bare_loop(job: Job, data: Data, batches: list[Batch], order: Order) -> float:
    """The seconds of a step in a hand-written loop with the same settings.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    state = build(job, data)
    timer = StepTimer(job.device)
    timer.resume()
    for step, (images, labels) in enumerate(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step, order.steps_per_epoch, job.config)
        bare_step(state, job.config, images, labels)
        timer.tick()
    return mean(slowest(timer.read(), job.device)[STARTUP_STEPS:])


@contextlib.contextmanager
def _scratch_folder(job: Job) -> Iterator[Path]:
    """A temporary folder on rank 0's host for the records and checkpoints of the runner's loop."""
    own = tempfile.mkdtemp(prefix="mpiddp-bench-") if job.is_rank_0 else ""
    path = Path(job.coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)[0])
    try:
        yield path
    finally:
        if job.is_rank_0:
            shutil.rmtree(path)
