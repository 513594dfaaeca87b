"""`mpiddp bench allreduce`: the bandwidth of an all-reduce by size, over gloo and over NCCL.

The bus bandwidth is size divided by time, times 2·(n-1)/n, the load of every link for a sum over n ranks.
So it is comparable with the hardware's bandwidth for any n:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from mpiddp.arguments import duration, whole
from mpiddp.bench.figures import Result, Spread, aligned, percentile
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import option
from mpiddp.errors import UserError
from mpiddp.text import shown, size_text

if TYPE_CHECKING:
    import torch

    from mpiddp.world import World

MIN_BYTES = 1024
STEP = 4  # the factor from one size to the next
WARMUP = 3  # all-reduces of each size
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def size_bytes(text: str) -> int:
    """A parser for 4096, 64K, 16M and 1G, where K is 1024 bytes. The minimum is 1K."""
    match = re.fullmatch(r"([0-9]{1,16})([KMG]?)B?", text.upper(), re.ASCII)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not MIN_BYTES <= size < 1 << 50:
        raise argparse.ArgumentTypeError(
            f"expected a size of at least 1K, such as 64K, 16M or 1G, not {shown(text)!r}"
        )
    return size


@dataclass(frozen=True)
class Options:
    backend: str | None = option(
        "one of them (default: both if there are GPUs)", choices=("gloo", "nccl")
    )
    max_size: int = option("largest message", type=size_bytes, default="1G")
    seconds: float = option("time for each size", type=duration, default=1.0)
    repeats: int = option("least repeats of a size", type=whole(1), default=5)

    @property
    def sizes(self) -> list[int]:
        found = [MIN_BYTES]
        while found[-1] * STEP <= self.max_size:
            found.append(found[-1] * STEP)
        return found


class Point(TypedDict):
    """The all-reduces of one size; their median time, and their bandwidth (p50, p10, p90)."""

    backend: str
    bytes: int
    count: int
    time_s: float
    bus_gb_per_s: Spread


class Results(TypedDict):
    ranks: int
    points: list[Point]
    hosts: list[Result]


def measure(options: Options, jobs: Jobs) -> Results:
    if jobs.slots < 2:
        raise UserError("an all-reduce needs at least 2 ranks. Example: -H localhost:2")
    note(f"allreduce: {jobs.slots} ranks, up to {size_text(options.sizes[-1])}")
    found: Results = jobs.run("allreduce", options, ranks=jobs.slots)
    return found


def table(results: Results) -> str:
    rows = [
        [
            point["backend"],
            f"{point['bytes']:,}",
            str(point["count"]),
            f"{1000 * point['time_s']:.3f}",
            *(f"{each:.3f}" for each in point["bus_gb_per_s"].values()),
        ]
        for point in results["points"]
    ]
    head = ("backend", "bytes", "times", "ms", "bus GB/s", "p10", "p90")
    title = f"All-reduce over {results['ranks']} ranks, fp32, time of the slowest rank"
    return f"{title}\n\n{aligned(head, rows)}"


# --- a rank ---


def rank(world: World, options: Options, training: list[str]) -> Results:
    """All-reduces of growing size, each timed separately, on this rank."""
    import torch

    from mpiddp.bench.training import hosts_of
    from mpiddp.runtime.join import join
    from mpiddp.runtime.torch.process_group import choose_backend, device_of, process_group

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
                    found.append(_point(backend, size, seconds, world.world_size))
    return {"ranks": world.world_size, "points": found, "hosts": hosts}


def _point(backend: str, size: int, seconds: list[float], ranks: int) -> Point:
    speeds = [2 * (ranks - 1) / ranks * size / taken / 1e9 for taken in seconds]
    middle, low, high = (percentile(speeds, percent) for percent in (50, 10, 90))
    return {
        "backend": backend,
        "bytes": size,
        "count": len(speeds),
        "time_s": percentile(seconds, 50),
        "bus_gb_per_s": {"median": middle, "low": low, "high": high},
    }


def _time(size: int, device: torch.device, budget_s: float, least: int) -> list[float]:
    """The seconds of each all-reduce of `size` bytes on its slowest rank."""
    import torch

    # `full` writes every page, so that the first all-reduce does not wait for page faults.
    numbers = torch.full((size // 4,), 0.0, device=device)
    seconds = _series(numbers, WARMUP, device)
    # `seconds` is equal on all ranks, so all ranks compute the same count.
    count = max(least, min(1000, int(budget_s / max(1e-9, min(seconds)))))
    return _series(numbers, count, device)


def _series(numbers: torch.Tensor, count: int, device: torch.device) -> list[float]:
    import torch.distributed as dist

    from mpiddp.train.measure import StepTimer, slowest

    timer = StepTimer(device)
    timer.resume()
    for _ in range(count):
        dist.all_reduce(numbers)
        timer.tick()
    return slowest(timer.read(), device)
