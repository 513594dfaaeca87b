"""The parts of `mpiddp train`, so that the benchmarks measure the same training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import mpiddp
from mpiddp.bench.figures import Result
from mpiddp.train.config import Config, parse, resolve
from mpiddp.train.data import Data, open_data
from mpiddp.train.measure import measured
from mpiddp.train.order import Order
from mpiddp.train.records import Records
from mpiddp.train.run import plan_order
from mpiddp.train.state import State, build_model, build_state, choose_kernels
from mpiddp.train.train import autocast, train


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
def started(training: Sequence[str]) -> Iterator[tuple[mpiddp.World, Config]]:
    """Start the job of `mpiddp train TRAINING`, up to its process group."""
    options = parse(list(training))
    with mpiddp.process_group(backend=options.backend) as world:
        with mpiddp.together():
            config = resolve(options, world.world_size, torch.device(str(world.device)))
        choose_kernels(config)
        yield world, config


@contextlib.contextmanager
def synthetic_job(training: Sequence[str], steps: int) -> Iterator[Job]:
    """Start it with so many steps. The images are whole unless the options ask for smaller ones."""
    with started(["--low-res-epochs=0", *training, "--use-syn"]) as (world, config):
        config = replace(config, epochs=1)
        with mpiddp.together():
            data = open_data(config, torch.device(str(world.device)))
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
    records = Records(*settings, sinks=())
    for step in train(job.config, job.data, job.order, state, 0):
        mpiddp.should_stop()
        records.on_step(step, saves=False)
    return measured(state.timer, job.config.global_batch_size, job.device)


def bare_step(state: State, config: Config, images: Tensor, labels: Tensor) -> None:
    """Run a step as in a hand-written loop: images [N, C, H, W], labels [N]."""
    with autocast(config, images.device):
        loss = F.cross_entropy(state.ddp(images), labels)
    state.scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
