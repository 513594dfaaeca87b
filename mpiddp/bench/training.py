"""The parts of `mpiddp train`, so that the benchmarks measure the same training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpiddp.bench.figures import PATIENCE_S, Result
from mpiddp.bench.machine import machine
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import process_group
from mpiddp.train.config import Config, resolve
from mpiddp.train.data import Data, open_data
from mpiddp.train.measure import StepTimer
from mpiddp.train.options import parse
from mpiddp.train.order import Order
from mpiddp.train.state import State, build_model, build_optimizer, build_state, choose_kernels
from mpiddp.train.train import autocast
from mpiddp.world import World


@dataclass(frozen=True)
class Job:
    """The ranks in their process group, with their common settings. `hosts` has one entry per host."""

    coordinator: Coordinator
    config: Config
    backend: str
    device: torch.device
    hosts: list[Result]

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that sends the results."""
        return self.coordinator.world.rank == 0


@contextlib.contextmanager
def started(world: World, training: Sequence[str]) -> Iterator[Job]:
    """Start the job of `mpiddp train TRAINING`, up to its process group."""
    with join(world) as coordinator:
        with coordinator.all_or_none():
            options = parse(list(training))
        with process_group(world, backend=options.backend) as joined:
            device = torch.device(str(joined.device))
            with coordinator.all_or_none():
                config = resolve(options, joined.world_size, device)
            choose_kernels(config)
            yield Job(coordinator, config, str(joined.backend), device, hosts_of(coordinator))


def synthetic_job(world: World, training: Sequence[str]) -> contextlib.AbstractContextManager[Job]:
    """The same on synthetic images, which are whole unless the options ask for smaller ones."""
    return started(world, ["--low-res-epochs=0", *training, "--use-syn"])


def hosts_of(coordinator: Coordinator) -> list[Result]:
    """Gather each host's machine and its number of ranks. All ranks must call this."""
    own = machine() if coordinator.world.local_rank == 0 else None
    found = coordinator.all_gather_json(own, timeout_s=PATIENCE_S)
    return [{**host, "ranks": coordinator.hostnames.count(host["host"])} for host in found if host]


def open_source(job: Job, **changed: Any) -> Data:
    """Open the data of the configuration, with these changes. All ranks must call this."""
    config = replace(job.config, **changed)
    with job.coordinator.all_or_none():
        return open_data(config, job.device)


def build(job: Job, data: Data) -> State:
    """Build a fresh model under DDP, its optimizer and scaler as `mpiddp train` does.

    All ranks must call this.
    """
    return build_state(build_bare(job, data).model, job.config, [])


def build_bare(job: Job, data: Data) -> State:
    """Build the same without DDP. All ranks must call this."""
    with job.coordinator.all_or_none():
        model = build_model(job.config, data, job.device)
    scaler = torch.amp.GradScaler(job.device.type, enabled=job.config.amp == "fp16")
    return State(
        model, model, model, build_optimizer(model, job.config), scaler, StepTimer(job.device)
    )


def bare_step(state: State, config: Config, images: Tensor, labels: Tensor) -> None:
    """Run a step as in a hand-written loop: images [N, C, H, W], labels [N]."""
    with autocast(config, images.device):
        loss = F.cross_entropy(state.ddp(images), labels)
    state.scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)


def synthetic_order(job: Job, data: Data, count: int) -> Order:
    """Plan `count` steps in one epoch of a synthetic source, and give the source as many images."""
    data.train.num_images = count * job.config.global_batch_size
    world = job.coordinator.world
    return Order(
        num_samples=data.train.num_images,
        global_batch_size=job.config.global_batch_size,
        grad_accum_steps=job.config.grad_accum_steps,
        rank=world.rank,
        world_size=world.world_size,
        seed=job.config.seed,
    )


def settings(job: Job) -> Result:
    """The settings that determine the speed of a step, for the results."""
    return {**vars(job.config), "backend": job.backend, "device": job.device.type}
