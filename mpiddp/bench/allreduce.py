"""`mpiddp bench allreduce`: the bandwidth of an all-reduce by size, over gloo and over NCCL.

The bus bandwidth is size divided by time, times 2·(n-1)/n, the load of every link for a sum over n ranks.
So it is comparable with the hardware's bandwidth for any n:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from mpiddp.arguments import Option, duration, whole
from mpiddp.bench.main import BENCHMARKS
from mpiddp.bench.measured_jobs import (
    Jobs,
    Result,
    aligned,
    emit,
    machine,
    new_parser,
    spread,
    values_of,
)
from mpiddp.errors import print_error
from mpiddp.hosts.where import FILE, settle
from mpiddp.text import counted, shown

if TYPE_CHECKING:
    import torch

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


OPTIONS = [
    Option(
        "--backend", choices=("gloo", "nccl"), help="one of them (default: both if there are GPUs)"
    ),
    Option(
        "--max-size",
        value="SIZE",
        parse=size_bytes,
        default="1G",
        help="largest message (default: 1G)",
    ),
    Option(
        "--seconds",
        value="TIME",
        parse=duration,
        default=1.0,
        help="time for each size (default: 1 s)",
    ),
    Option(
        "--repeats",
        value="N",
        parse=whole(1),
        default=5,
        help="least repeats of a size (default: 5)",
    ),
]


def main(argv: list[str]) -> int:
    """Run `mpiddp bench allreduce ARGV`; see `mpiddp.bench.main`."""
    prog, job = "mpiddp bench allreduce", ("-m", "mpiddp.bench.allreduce")
    parser, where = new_parser(prog, BENCHMARKS["allreduce"], OPTIONS)
    FILE.add_to(parser)
    values = parser.parse_args(argv)
    settle(values)
    options = values_of(OPTIONS, values)
    jobs = Jobs(prog, argv, values, where, job, least_ranks=2)

    def measure() -> Any:
        print_error(f"allreduce: {counted(jobs.slots, 'rank')}")
        return jobs.run(*job, json.dumps(options))

    return jobs.report({**options, "arguments": []}, measure, table)


def table(results: Result) -> str:
    ranks, rows = results["ranks"], []
    for point in results["points"]:
        load = 2 * (ranks - 1) / ranks * point["bytes"] / 1e9
        speeds = [load / seconds for seconds in point["seconds"]]
        cells = [point["backend"], f"{point['bytes']:,}", str(len(speeds))]
        rows.append([*cells, f"{1000 * median(point['seconds']):.3f}", spread(speeds, ".3f")])
    head = ("backend", "bytes", "times", "ms", "bus GB/s")
    return f"All-reduce over {ranks} ranks, fp32, time of the slowest rank\n\n{aligned(head, rows)}"


# --- a rank ---


def rank(backend: str | None, max_size: int, seconds: float, repeats: int) -> None:
    """All-reduces of growing size, each timed separately. Rank 0 sends the results."""
    import torch
    import torch.distributed as dist

    import mpiddp
    from mpiddp.runtime.torch.process_group import choose_backend

    # NCCL comes first, because it refuses ranks that share a GPU, before gloo has taken its time.
    automatic = dict.fromkeys([choose_backend(None), "gloo"])
    points: list[
        Result
    ] = []  # of each size, with the seconds of each all-reduce on its slowest rank
    for name in [backend] if backend else automatic:
        with mpiddp.process_group(backend=name) as world:
            device, size = torch.device(str(world.device)), MIN_BYTES
            while size <= max_size:
                # `full` writes every page, so that the first all-reduce does not wait for page faults.
                numbers = torch.full((size // 4,), 0.0, device=device)
                # All ranks have the same times, and so compute the same count.
                quickest = max(1e-9, min(_series(numbers, WARMUP, device)))
                count = max(repeats, min(1000, int(seconds / quickest)))
                points.append(
                    {"backend": name, "bytes": size, "seconds": _series(numbers, count, device)}
                )
                size *= STEP
            machines: list[Any] = [None] * world.world_size
            dist.all_gather_object(machines, machine() if world.local_rank == 0 else None)
    if world.rank == 0:
        hosts = [host for host in machines if host]
        emit({"ranks": world.world_size, "points": points, "hosts": hosts})


def _series(numbers: torch.Tensor, count: int, device: torch.device) -> list[float]:
    """The seconds of each of so many all-reduces on its slowest rank."""
    import torch
    import torch.distributed as dist

    on_gpu = device.type != "cpu"

    def clock() -> Any:
        """The time; on a GPU an event on its stream, so that nothing waits for the device."""
        if not on_gpu:
            return time.perf_counter()
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    ends = [clock()]
    for _ in range(count):
        dist.all_reduce(numbers)
        ends.append(clock())
    if on_gpu:
        ends[-1].synchronize()
    spans = [a.elapsed_time(b) / 1000 if on_gpu else b - a for a, b in pairwise(ends)]
    slowest = torch.tensor(spans, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return list(slowest.tolist())


if __name__ == "__main__":
    rank(**json.loads(sys.argv[1]))
