"""The ranks of tests/gpu: `ranks.py WHAT [ARGS]`. Two ranks share GPU 0.

    mpirun -np 2 python tests/gpu/ranks.py group
    mpirun -np 2 python tests/gpu/ranks.py train --use-syn …       # any verb of mpiddp

test_gpu.py forks its trainings from one process that has imported torch, and has not touched a GPU.
`mpiddp` gives each rank a GPU of its own, so its choice of the device is replaced. Rank 0 sends what it has
found by `mpiddp.bench.measured_jobs.emit`.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from mpiddp import cli
from mpiddp.bench.measured_jobs import emit
from mpiddp.runtime.collectives import calls
from mpiddp.runtime.torch import process_group
from mpiddp.world import World

FAILS_AT = 20  # steps


def share_gpu(world: World) -> None:
    """NCCL refuses two ranks on one GPU of one host. NCCL_HOSTID lets it take each for a host of its own."""
    os.environ["NCCL_HOSTID"] = f"host-of-rank-{world.rank}"

    def first_gpu(world: World, backend: str | None = None) -> torch.device:
        uses_gpu = (backend or process_group.choose_backend(None)) == "nccl"
        return torch.device("cuda", 0) if uses_gpu else torch.device("cpu")

    process_group.device_of = first_gpu


def form_twice() -> None:
    """Form the process group, sum and average over it, and leave it, twice."""
    found = []
    for _ in range(2):
        with mpiddp.process_group() as world:
            one = torch.ones(1, device=world.device)
            dist.all_reduce(one)
            everyone: list[Any] = [None] * world.world_size
            dist.all_gather_object(everyone, world.rank)  # NCCL carries pickles on the GPU
            facts = {"world_size": world.world_size, "backend": world.backend, "ranks": everyone}
            facts |= {"device": str(world.device), "sum": one.item()}
            facts |= {"bound": str(getattr(dist.group.WORLD, "bound_device_id", None))}
            model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).to(world.device))
            model(torch.full((1, 4), float(world.rank), device=world.device)).sum().backward()
            facts |= {"gradient": model.module.weight.grad[0, 0].item()}
            found.append(facts)
    if world.rank == 0:
        emit({"groups": found, "is_destroyed": not dist.is_initialized()})


def disturb(how: str) -> None:
    """Sum without end. The last rank fails, does not come, calls something else, or comes late each time."""
    with mpiddp.process_group(timeout_s=15 if how == "times out" else 600) as world:
        numbers = torch.ones(1 << 20, device=world.device)
        is_last = world.rank == world.world_size - 1
        for step in range(sys.maxsize):
            if is_last and step == FAILS_AT:
                print("planned", how, flush=True)
                if how == "raises":
                    raise ValueError("planned failure")
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "differs":
                    dist.broadcast(numbers, world.rank)
                elif how != "is late":
                    threading.Event().wait()
            time.sleep(0.1 if is_last and how == "is late" else 0.02)
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            assert numbers.sum().item() == 1 << 20


def capture() -> None:
    """Capture a CUDA graph while another thread reads the calls of NCCL."""
    with mpiddp.process_group() as world:
        numbers = torch.ones(1 << 26, device=world.device)
        is_over = threading.Event()
        read: list[int] = []

        def read_calls() -> None:
            while not is_over.is_set():
                found = calls()
                read.append(len(found["groups"]))

        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        reader = threading.Thread(target=read_calls)
        for _ in range(50):
            dist.all_reduce(numbers)  # some have not ended when the capture begins
        reader.start()
        with torch.cuda.graph(graph):
            for _ in range(2000):
                numbers += 1
        is_over.set()
        reader.join()
        numbers.zero_()
        graph.replay()
        emit({"sum": numbers[0].item(), "reads": len(read), "groups": max(read)})


WHAT = {"group": form_twice, "disturb": disturb, "capture": capture}


def main(what: str, *arguments: str) -> int:
    world = World.from_env()
    if world.world_size > 1:
        share_gpu(world)
    if what not in WHAT:
        return cli.main([what, *arguments])
    WHAT[what](*arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
