"""The small real job of `mpiddp doctor`: one rank on each host, an all-reduce with a known result.

    mpiddp launch -H node1:1,node2:1 -m mpiddp.doctor.job

Then each rank measures what needs torch: all-reduces within its host and with a few others, copies to a GPU.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

from mpiddp.doctor.agent import process_facts
from mpiddp.doctor.links import rounds
from mpiddp.doctor.stack import HEAVY, stack

PROOF = "mpiddp-doctor "
COUNT = 4 << 20  # floats: 16 MB
# On a CPU a repetition is short: the best of many is undisturbed by what else runs.
_COUNTS = {"gloo": 1 << 18, "nccl": COUNT}
_LEAST_REPEATS, _MOST_REPEATS = 3, 60
_LONGEST_S = 1.0  # of the repetitions of one measurement
_PARTNERS = 3  # a host whose partner is slow has others
_JOIN_S = 20.0


def main() -> None:
    """Sum a tensor over all ranks. Rank 0 prints what each rank says of itself."""
    import torch
    import torch.distributed as dist

    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # one rank on each host
        device = "cuda"
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((COUNT,), float(rank + 1), device=device)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    wrong = int((values != size * (size + 1) / 2).sum())
    seconds = time.perf_counter() - began
    slowest = torch.tensor([seconds], device=device)  # all repeat a measurement equally often
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    figures = _figures(values.is_cuda, rank, size, slowest.item() / COUNT)
    own = {
        "hostname": socket.gethostname(),
        "wrong": wrong,
        "seconds": seconds,
        "stack": stack(HEAVY),
    }
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {**own, "figures": figures, **process_facts()})
    if rank == 0:
        print(PROOF + json.dumps(gathered), flush=True)
    dist.destroy_process_group()


def _figures(is_cuda: bool, rank: int, size: int, slowest_s: float) -> dict[str, float]:
    """Bytes a second. What this host cannot measure is missing, and is then said to be unknown.

    Args:
        slowest_s: the seconds of a float in an all-reduce of all hosts.
    """
    import torch
    import torch.distributed as dist

    backend = "nccl" if is_cuda else "gloo"
    values = torch.zeros(_COUNTS[backend], device="cuda" if is_cuda else "cpu")
    most = int(_LONGEST_S / (slowest_s * _COUNTS[backend]))
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, most))
    found = {}
    if (across := _across(values, repeats, rank, size)) is not None:
        found[f"all-reduce with other hosts ({backend})"] = across
    dist.barrier()  # what a host measures alone must not disturb the others' all-reduces
    alone: dict[str, Callable[[Any, int], float | None]] = {
        f"all-reduce within the host ({backend})": _within,
        "copy from host to device": _to_device,
    }
    for what, measure in alone.items():
        try:
            figure = measure(values, repeats)
        except RuntimeError:  # of NCCL, gloo or CUDA
            continue
        if figure is not None:
            found[what] = figure
    return found


def _across(values: Any, repeats: int, rank: int, size: int) -> float | None:
    """The best of all-reduces with one other rank at a time: a slow one is slow with all of them."""
    import torch.distributed as dist

    best: list[float] = []
    for pairs in islice(rounds(range(size)), _PARTNERS):
        dist.barrier()
        for pair in pairs:
            if rank in pair:
                group = dist.new_group(sorted(pair), use_local_synchronization=True)
                work = partial(dist.all_reduce, values, group=group)
                best.append(_rate(values, repeats, work))
    return max(best, default=None)


def _within(values: Any, repeats: int) -> float | None:
    """An all-reduce of all GPUs of this process, or of two members in threads; None with one GPU."""
    import torch
    import torch.distributed as dist

    if values.is_cuda:
        count = torch.cuda.device_count()
        copies = [torch.zeros_like(values, device=f"cuda:{number}") for number in range(count)]
        work = partial(torch.cuda.nccl.all_reduce, copies)
        return _rate(values, repeats, work) if count > 1 else None
    store, limit = dist.HashStore(), timedelta(seconds=_JOIN_S)

    def member(number: int) -> float:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timeout=limit)
        own = torch.zeros_like(values)
        return _rate(own, repeats, lambda: group.allreduce([own]).wait())

    with ThreadPoolExecutor(2) as threads:
        return max(threads.map(member, range(2)))


def _to_device(values: Any, repeats: int) -> float | None:
    """A copy of pinned memory to the GPU; None without a GPU."""
    import torch

    if not values.is_cuda:
        return None
    pinned = torch.zeros(values.shape, pin_memory=True)
    return _rate(values, repeats, lambda: values.copy_(pinned, non_blocking=True))


def _rate(values: Any, repeats: int, work: Callable[[], object]) -> float:
    """The bytes of `values` a second, in the best repetition."""
    import torch

    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        if values.is_cuda:
            for number in range(torch.cuda.device_count()):
                torch.cuda.synchronize(number)
        times.append(time.perf_counter() - began)
    return float(values.nbytes / min(times))


if __name__ == "__main__":
    main()
