"""The parts of `mpiddp train`, so that the benchmarks measure the same training."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mpiddp.bench.figures import Result
from mpiddp.bench.machine import machine
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import choose_backend, default_group, device_of
from mpiddp.train.config import resolve
from mpiddp.train.datasets import Data, open_data
from mpiddp.train.options import parse
from mpiddp.train.order import Order
from mpiddp.train.parallel import wrap
from mpiddp.train.step import (
    State,
    autocast,
    build_model,
    build_optimizer,
    build_scaler,
    choose_kernels,
)
from mpiddp.world import World

EXCHANGE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Job:
    """The ranks in their process group, with their common settings. `hosts` has one entry per host."""

    coordinator: Coordinator
    config: Namespace
    backend: str
    device: torch.device
    hosts: list[Result]

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that sends the results."""
        return self.coordinator.world.rank == 0


@contextlib.contextmanager
def synthetic_job(
    world: World, training: Sequence[str], fixed: Sequence[str] = ("--parallel=ddp",)
) -> Iterator[Job]:
    """Start the job of `mpiddp train TRAINING --use-syn`, up to its process group.

    It trains on whole images, unless the options ask for smaller ones. `fixed` overrides options.
    """
    first = [] if any("--low-res-epochs" in each for each in training) else ["--low-res-epochs=0"]
    with join(world) as coordinator:
        config, backend, device = resolve_training(
            coordinator, [*first, *training, "--use-syn", *fixed]
        )
        hosts = hosts_of(coordinator)
        with default_group(coordinator, backend, device, timeout_s=EXCHANGE_TIMEOUT_S):
            yield Job(coordinator, config, backend, device, hosts)


def resolve_training(
    coordinator: Coordinator, training: Sequence[str]
) -> tuple[Namespace, str, torch.device]:
    """Resolve the configuration, the backend and the device of `mpiddp train TRAINING`.

    All ranks must call this.
    """
    with coordinator.all_or_none():
        options = parse(list(training))
        backend = choose_backend(options.backend)
        device = device_of(coordinator.world, backend)
        config = resolve(options, coordinator.world.world_size, device)
    if device.type != "cpu":
        # a benchmark of data sources has no process group to do so
        torch.accelerator.set_device_index(device)
    choose_kernels(config)
    return config, backend, device


def hosts_of(coordinator: Coordinator) -> list[Result]:
    """Gather each host's machine and its number of ranks. All ranks must call this."""
    own = asdict(machine()) if coordinator.world.local_rank == 0 else None
    found = coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)
    return [{**host, "ranks": coordinator.hostnames.count(host["host"])} for host in found if host]


def open_source(job: Job) -> Data:
    """Open the data of the configuration. All ranks must call this."""
    with job.coordinator.all_or_none():
        return open_data(job.config, job.coordinator.world, job.device)


def build(job: Job, data: Data) -> State:
    """Build a fresh model under DDP, its optimizer and scaler as `mpiddp train` does.

    All ranks must call this.
    """
    bare = build_bare(job.coordinator, job.config, data, job.device)
    return replace(bare, model=wrap(bare.model, job.config, data.shape, []))


def build_bare(
    coordinator: Coordinator, config: Namespace, data: Data, device: torch.device
) -> State:
    """Build the same without DDP and without a process group. All ranks must call this."""
    with coordinator.all_or_none():
        model = build_model(config, data, device)
    return State(model, build_optimizer(model, config), build_scaler(config, device))


def bare_step(state: State, config: Namespace, images: Tensor, labels: Tensor) -> None:
    """Run a step as in a hand-written loop: images [N, C, H, W], labels [N]."""
    with autocast(config, images.device):
        loss = F.cross_entropy(state.model(images), labels)
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
