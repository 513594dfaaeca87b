"""The parts of `mpiddp train`, so that the benchmarks measure the same training.

A benchmark takes its options too: `check_training` is its check of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.bench.measured_jobs import Result
from mpiddp.errors import UserError
from mpiddp.train.config import Config, parse, resolve
from mpiddp.train.data import Data
from mpiddp.train.main import choose_kernels, open_config
from mpiddp.train.trainer import STARTUP_STEPS, Trainer

_NOT_APPLICABLE = (
    *("--epochs", "--steps-per-epoch", "--use-syn", "--parallel", "--ema-decay", "--weights"),
    *("--out", "--resume", "--save-every", "--keep", "--log-every", "--stop-at-step"),
    *("--check-determinism", "--check-divergence"),
)


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

    @property
    def device(self) -> torch.device:
        return self.data.train.device

    @property
    def settings(self) -> Result:
        """What determines the speed of a step, for the results."""
        return {**vars(self.config), "backend": self.world.backend, "device": self.device.type}


@contextlib.contextmanager
def synthetic_job(training: Sequence[str], num_steps: int) -> Iterator[Job]:
    """Start `mpiddp train TRAINING` with so many steps on whole images."""
    options = parse([*training, "--use-syn"])
    with mpiddp.process_group(backend=options.backend) as world:
        device = torch.device(str(world.device))
        with mpiddp.together():
            config = resolve(options, world.world_size, device)
            config = replace(config, epochs=1, sides=())
            choose_kernels(config)
        data = open_config(config, world)
        data.train.num_images = num_steps * config.global_batch_size
        yield Job(world, config, data)


def build(job: Job, out: Path = Path()) -> Trainer:
    """A fresh training, as that of `mpiddp train`. A collective."""
    return Trainer(job.config, job.data, job.world, out)


class Clock:
    """The seconds of each step, from the end of the one before."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type != "cpu"
        self._ends = [time.perf_counter()]

    def step_ends(self, *, waits: bool = False) -> None:
        """A GPU may lag behind, unless this `waits` for it: then only the sum of the steps is exact."""
        if self._is_gpu and (waits or len(self._ends) == STARTUP_STEPS):
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of all steps so far, of this rank."""
        if self._is_gpu:
            torch.cuda.synchronize()
            self._ends[-1] = time.perf_counter()
        return [end - begin for begin, end in pairwise(self._ends)]

    def figures(self, job: Job) -> Result:
        """The speed of all steps but the first few, on the slowest rank. A collective."""
        spans = self.seconds()[STARTUP_STEPS:]
        slowest = torch.tensor([*spans, sum(spans)], dtype=torch.float64, device=job.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        *times, total = slowest.tolist()
        images = len(times) * job.config.global_batch_size
        return {"images_per_s": images / total, "step_time_p50_s": median(times)}


def time_runner(job: Job) -> Result:
    """The figures of a training with its records and without its saves. A collective."""
    training = build(job)
    training.begin(0)
    clock = Clock(job.device)
    for step in training.steps(0):
        mpiddp.should_stop()
        training.report(step)
        clock.step_ends()
    return clock.figures(job)
