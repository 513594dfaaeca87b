"""A rank of `python -m benchmarks.step`: steps of `mpiddp train`, and of a bare loop."""

from __future__ import annotations

import json
import sys

import torch.nn.functional as F

from benchmarks.harness import turns
from benchmarks.step import BARE, BARE_AGAIN, RUNNER, Options
from benchmarks.training import Clock, Job, build, synthetic_job, time_runner
from mpiddp.bench.measured_jobs import Result, emit
from mpiddp.train.data import Batch
from mpiddp.train.trainer import STARTUP_STEPS


def main() -> None:
    """Run blocks of both loops in turn, each with a fresh model: other work affects both equally."""
    options, training = Options(**json.loads(sys.argv[1])), sys.argv[2:]
    step_s: dict[str, list[float]] = {RUNNER: [], BARE: [], BARE_AGAIN: []}
    count = STARTUP_STEPS + options.steps
    with synthetic_job([*training, "--grad-accum-steps", "1"], count) as job:
        indices = [numbers for (numbers,) in build(job).sampler.indices(epoch=0)]
        tensors = list(job.data.train.batches(indices, epoch=0))
        for _, name in turns([*step_s], options.rounds):
            figures = time_runner(job) if name == RUNNER else _time_bare_loop(job, tensors)
            step_s[name].append(job.config.global_batch_size / figures["images_per_s"])
    if job.world.rank == 0:
        emit({"settings": job.settings, "step_s": step_s})


def _time_bare_loop(job: Job, tensors: list[Batch]) -> Result:
    """The figures of a hand-written loop with the same settings, measured in the same way.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    training = build(job)
    clock = Clock(job.device)
    for step, (images, labels) in enumerate(tensors):
        for group in training.optimizer.param_groups:
            group["lr"] = training.learning_rate(step)
        with training.autocast():
            loss = F.cross_entropy(training.ddp(images), labels)
        training.scaler.scale(loss).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.optimizer.zero_grad(set_to_none=True)
        clock.step_ends()
    return clock.figures(job)


if __name__ == "__main__":
    main()
