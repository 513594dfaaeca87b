"""A rank of `mpiddp bench allreduce`: all-reduces of growing size, each timed separately."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mpiddp.bench.allreduce import Options
from mpiddp.bench.figures import Result
from mpiddp.bench.ranks.training import hosts_of
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import choose_backend, device_of, process_group
from mpiddp.train.measure import StepTimer, slowest
from mpiddp.world import World

WARMUP = 3


def rank(world: World, options: Options, training: list[str]) -> Result:
    with join(world) as coordinator:
        with coordinator.all_or_none():
            backends = ["gloo", "nccl"] if choose_backend(None) == "nccl" else ["gloo"]
            backends = [choose_backend(options.backend)] if options.backend else backends
            for backend in backends:  # ranks that share a GPU are refused before gloo is measured
                device_of(coordinator.world, backend)
        hosts = hosts_of(coordinator)
        found = []
        for backend in backends:
            with process_group(world, backend=backend) as joined:
                device = torch.device(str(joined.device))
                for size in options.sizes:
                    seconds = _time(size, device, options.seconds, options.repeats)
                    found.append({"backend": backend, "bytes": size, "seconds": seconds})
    return {"sums": found, "hosts": hosts}


def _time(size: int, device: torch.device, budget_s: float, least: int) -> list[float]:
    """The seconds of each all-reduce of `size` bytes on its slowest rank."""
    # `full` writes every page, so that the first all-reduce does not wait for page faults.
    numbers = torch.full((size // 4,), 0.0, device=device)
    seconds = _series(numbers, WARMUP, device)
    # `seconds` is equal on all ranks, so all ranks compute the same count.
    count = max(least, min(1000, int(budget_s / max(1e-9, min(seconds)))))
    return _series(numbers, count, device)


def _series(numbers: torch.Tensor, count: int, device: torch.device) -> list[float]:
    timer = StepTimer(device)
    timer.resume()
    for _ in range(count):
        dist.all_reduce(numbers)
        timer.tick()
    return slowest(timer.read(), device)
