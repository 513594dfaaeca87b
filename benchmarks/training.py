"""The parts of `mpiddp train`, so that the benchmarks measure the same training.

A benchmark takes its options too: `check_training` is that of its `Row`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from mpiddp.train.config import OF_RUN, Config, parse, resolve
from mpiddp.train.measure import measured
from mpiddp.train.order import Order
from mpiddp.train.records import Records
from mpiddp.train.run import plan_order
from mpiddp.train.state import State, build_model, build_state, choose_kernels

import mpiddp
from mpiddp.bench.figures import Result
from mpiddp.errors import UserError
from mpiddp.train.data import Data, open_data
from mpiddp.train.train import train

_NOT_APPLICABLE = {
    f"--{name}".replace("_", "-") for name in (*OF_RUN, "out", "log_every", "parallel")
}


def check_training(prog: str, training: list[str]) -> None:
    """Raise UserError for options of the training that are wrong, or mean nothing to a benchmark."""
    parse(training)
    for argument in training:
        if argument.partition("=")[0].replace("_", "-") in _NOT_APPLICABLE:
            raise UserError(
                f"{argument} does not apply to {prog}, which runs a fixed number of steps of "
                "DistributedDataParallel and keeps no checkpoint. Leave it out."
            )


def title(settings: Result) -> str:
    """What the training of a benchmark was."""
    dataset, amp, backend = (settings[name] for name in ("dataset", "amp", "backend"))
    return f"{settings['arch']} on synthetic {dataset}, amp {amp}, {backend}"


@dataclass(frozen=True)
class Job:
    """The training of a benchmark: one epoch of synthetic images."""

    world: mpiddp.World
    config: Config
    data: Data
    order: Order

    @property
    def device(self) -> torch.device:
        return self.data.train.device

    @property
    def settings(self) -> Result:
        """What determines the speed of a step, for the results."""
        return {**vars(self.config), "backend": self.world.backend, "device": self.device.type}


@contextlib.contextmanager
def synthetic_job(training: Sequence[str], steps: int) -> Iterator[Job]:
    """Start `mpiddp train TRAINING` with so many steps. Images are whole unless the options say otherwise."""
    options = parse(["--low-res-epochs=0", *training, "--use-syn"])
    with mpiddp.process_group(backend=options.backend) as world:
        device = torch.device(str(world.device))
        with mpiddp.together():
            config = replace(resolve(options, world.world_size, device), epochs=1)
            choose_kernels(config)
            data = open_data(config, device)
            data.train.num_images = steps * config.global_batch_size
            order = plan_order(config, world, data)
        yield Job(world, config, data, order)


def build(job: Job) -> State:
    """Build a fresh model under DDP, its optimizer and scaler as `mpiddp train` does. A collective."""
    with mpiddp.together():
        model = build_model(job.config, job.data, job.device)
    return build_state(model, job.config)


def time_runner(job: Job) -> Result:
    """The figures of a training without its saves, as `mpiddp train` itself measures them. A collective."""
    state, total = build(job), job.order.steps_per_epoch
    settings = (job.config, job.world, job.data, state, total)
    records = Records(*settings)
    for step in train(job.config, job.data, job.order, state, 0):
        mpiddp.should_stop()
        records.on_step(step, saves=False)
    return measured(state.timer, job.config.global_batch_size, job.device)
