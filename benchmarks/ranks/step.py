"""A rank of `python -m benchmarks.step`: steps of `mpiddp train`, and of a bare loop."""

from __future__ import annotations

import json
import sys

import torch.nn.functional as F
from mpiddp.train.measure import PHASES, STARTUP_STEPS, StepTimer, measured

from benchmarks.step import BARE, BARE_AGAIN, RUNNER, Options
from benchmarks.training import Job, build, synthetic_job, time_runner
from mpiddp.bench.figures import Result, emit, turns
from mpiddp.train.data import Batch, batches
from mpiddp.train.train import autocast, learning_rate


def main() -> None:
    """Run blocks of both loops in turn, each with a fresh model: other work affects both equally."""
    options, training = Options(**json.loads(sys.argv[1])), sys.argv[2:]
    step_s: dict[str, list[float]] = {RUNNER: [], BARE: [], BARE_AGAIN: []}
    phases_s: dict[str, list[float]] = {phase: [] for phase in PHASES}
    count = STARTUP_STEPS + options.steps
    with synthetic_job([*training, "--grad-accum-steps", "1"], count) as job:
        tensors = list(batches(job.data.train, job.order.steps(epoch=0), job.config, epoch=0))
        for _, name in turns([*step_s], options.rounds):
            figures = time_runner(job) if name == RUNNER else _time_bare_loop(job, tensors)
            step_s[name].append(job.config.global_batch_size / figures["images_per_s"])
            for phase in PHASES if name == RUNNER else ():
                phases_s[phase].append(figures["phases"][phase] / count)
    if job.world.rank == 0:
        emit({"settings": job.settings, "step_s": step_s, "phases_s": phases_s})


def _time_bare_loop(job: Job, tensors: list[Batch]) -> Result:
    """The figures of a hand-written loop with the same settings, measured as those of the runner.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    state = build(job)
    timer = StepTimer(job.device)
    timer.resume()
    for step, (images, labels) in enumerate(tensors):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step, job.order.steps_per_epoch, job.config)
        with autocast(job.config, images.device):
            loss = F.cross_entropy(state.ddp(images), labels)
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        timer.tick()
    return measured(timer, job.config.global_batch_size, job.device)


if __name__ == "__main__":
    main()
