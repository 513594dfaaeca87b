"""A rank of `mpiddp bench step`: the runner's loop and a bare loop, in blocks that alternate within one job.

Other work of the machines affects both equally. The loops start each block with a fresh model.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

from mpiddp.bench.figures import emit, turns
from mpiddp.bench.ranks.training import (
    Job,
    bare_step,
    build,
    open_source,
    plan_of,
    settings,
    synthetic_job,
)
from mpiddp.bench.step import BARE, BARE_AGAIN, RUNNER, Options
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.protocol.messages import PHASES
from mpiddp.train.checkpoint import Progress, open_checkpoints
from mpiddp.train.data.dataset import Batch, Data
from mpiddp.train.engine import build_model
from mpiddp.train.loop import TrainInputs, build_state, train
from mpiddp.train.metrics import STARTUP_STEPS, StepTimer, Summary, slowest
from mpiddp.train.opening import batches_of
from mpiddp.train.plan import TrainPlan
from mpiddp.world import World


def rank(world: World, options: Options, training: list[str]) -> None:
    count = STARTUP_STEPS + options.steps
    with synthetic_job(world, [*training, "--grad-accum-steps", "1"]) as job:
        data = open_source(job)
        plan = plan_of(job, data, count)
        steps = list(plan.order.steps(epoch=0))
        tensors = list(batches_of(steps, data, job.config, job.device, epoch=0))
        summaries: list[Summary] = []
        with _scratch_folder(job) as folder:
            blocks: dict[str, Callable[[Path], float]] = {
                RUNNER: lambda out: _time_runner(job, data, plan, out, summaries),
                BARE: lambda _: _time_bare_loop(job, data, tensors, plan),
                BARE_AGAIN: lambda _: _time_bare_loop(job, data, tensors, plan),
            }
            seconds: dict[str, list[float]] = {name: [] for name in blocks}
            for number, name in turns(list(blocks), options.rounds):
                seconds[name].append(blocks[name](folder / str(number)))
        if job.is_rank_0:
            emit(
                {
                    "loops": seconds,
                    "phases": [
                        {name: each.phases[name] / each.steps for name in PHASES}
                        for each in summaries
                    ],
                    "settings": settings(job),
                    "hosts": job.hosts,
                }
            )


def _time_runner(
    job: Job, data: Data, plan: TrainPlan, out: Path, summaries: list[Summary]
) -> float:
    """The seconds of a step as `mpiddp train` itself measures them."""
    config = replace(job.config, epochs=1, out=str(out))
    model = build_model(config, data)
    inputs = TrainInputs(config, plan, data, model, job.coordinator, job.device, RunDir(out))
    state, ddp = build_state(inputs)
    with open_checkpoints(out, config) as checkpoints:
        checkpoints.resume()
        summary = train(inputs, state, ddp, Progress(), checkpoints)
    assert summary is not None
    assert summary.images_per_s is not None
    summaries.append(summary)
    return summary.global_batch_size / summary.images_per_s


def _time_bare_loop(job: Job, data: Data, batches: list[Batch], plan: TrainPlan) -> float:
    """The seconds of a step in a hand-written loop with the same settings.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    state = build(job, data)
    timer = StepTimer(job.device)
    timer.resume()
    for step, (images, labels) in enumerate(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = plan.lr(step)
        bare_step(state, job.config, images, labels)
        timer.tick()
    return mean(slowest(timer.read(), job.device)[STARTUP_STEPS:])


@contextlib.contextmanager
def _scratch_folder(job: Job) -> Iterator[Path]:
    """A temporary folder on rank 0's host for the records and checkpoints of the runner's loop."""
    own = tempfile.mkdtemp(prefix="mpiddp-bench-") if job.is_rank_0 else ""
    path = Path(job.coordinator.broadcast_json(own))
    try:
        yield path
    finally:
        if job.is_rank_0:
            shutil.rmtree(path)
