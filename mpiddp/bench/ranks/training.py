"""The runner's own training, in parts: what the benchmarks measure is what `mpiddp train` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpiddp.bench.machine import machine
from mpiddp.bench.result_lines import Result
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.join import join
from mpiddp.runtime.process_group import choose_backend, default_group, device_of
from mpiddp.train.config import TrainConfig, resolve_defaults
from mpiddp.train.data import open_data
from mpiddp.train.data.source import Data
from mpiddp.train.engine import (
    autocast,
    build_model,
    build_optimizer,
    choose_kernels,
    computes_in_bf16,
    to_device,
)
from mpiddp.train.options import parse
from mpiddp.train.parallel import check_compression, wrap
from mpiddp.train.plan import Plan, make_plan
from mpiddp.world import World

EXCHANGE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Job:
    """The ranks in their process group, with the settings they share. `hosts` is one entry a host."""

    coordinator: Coordinator
    config: TrainConfig
    backend: str
    device: torch.device
    hosts: list[Result]

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that sends the results."""
        return self.coordinator.world.rank == 0


@dataclass(frozen=True)
class Parts:
    """What takes a step: the model, under DDP or bare, its optimizer, the scaler of fp16."""

    model: nn.Module
    optimizer: torch.optim.SGD
    scaler: torch.amp.GradScaler


@contextlib.contextmanager
def synthetic_job(world: World, training: Sequence[str]) -> Iterator[Job]:
    """The job of `mpiddp train TRAINING --use-syn`, up to its process group."""
    with join(world) as coordinator:
        config, backend, device = settled(coordinator, [*training, "--use-syn"])
        hosts = hosts_of(coordinator)
        with default_group(coordinator, backend, device, timeout_s=config.timeout):
            yield Job(coordinator, config, backend, device, hosts)


def settled(
    coordinator: Coordinator, training: Sequence[str]
) -> tuple[TrainConfig, str, torch.device]:
    """The configuration, the backend and the device that `mpiddp train TRAINING` would have."""
    with coordinator.all_or_none():
        options = parse(list(training))
        backend = choose_backend(options.backend)
        device = device_of(coordinator.world, backend)
        on_gpu = device.type != "cpu"
        config = resolve_defaults(
            options, coordinator.world, on_gpu=on_gpu, has_bf16=computes_in_bf16(device)
        )
        check_compression(config, device)
    if on_gpu:
        torch.cuda.set_device(device)  # a source has no process group that would do so
    choose_kernels(config)
    return config, backend, device


def hosts_of(coordinator: Coordinator) -> list[Result]:
    """Each host's machine, with its number of ranks. All ranks must call this."""
    own = asdict(machine()) if coordinator.world.local_rank == 0 else None
    found = coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)
    return [{**host, "ranks": coordinator.hostnames.count(host["host"])} for host in found if host]


def open_source(job: Job) -> Data:
    """The data of the configuration. All ranks must call this."""
    with job.coordinator.all_or_none():
        return open_data(job.config, job.coordinator.world, job.device)


def build(job: Job, data: Data) -> Parts:
    """A fresh model with all that trains it, as `mpiddp train` makes them. All ranks must call this."""
    bare = build_bare(job.coordinator, job.config, data, job.device)
    return replace(bare, model=wrap(bare.model, job.config, data.shape))


def build_bare(
    coordinator: Coordinator, config: TrainConfig, data: Data, device: torch.device
) -> Parts:
    """The same without DDP, so that it needs no process group. All ranks must call this."""
    with coordinator.all_or_none():
        model = build_model(config, data)
    model = to_device(model, config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
    return Parts(model, build_optimizer(model, config), scaler)


def bare_step(parts: Parts, config: TrainConfig, images: Tensor, labels: Tensor) -> None:
    """A step as people write it by hand: images [N, C, H, W], labels [N]."""
    with autocast(config, images.device):
        loss = F.cross_entropy(parts.model(images), labels, label_smoothing=config.label_smoothing)
    parts.scaler.scale(loss).backward()
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.optimizer.zero_grad(set_to_none=True)


def synthetic_plan(job: Job, data: Data, count: int) -> Plan:
    """`count` steps in one epoch of a synthetic source, which has as many images as that takes."""
    data.train.num_images = count * job.config.global_batch_size
    config = replace(job.config, epochs=1, steps_per_epoch=count)
    return make_plan(config, data, job.coordinator)


def settings(job: Job) -> Result:
    """What decides the speed of a step, as results show it."""
    return {**job.config.as_json(), "backend": job.backend, "device": job.device.type}
