"""The process group of a job and its device, and back out in good order.

with mpiddp.process_group() as world:      # or: world = mpiddp.init()
    model = DistributedDataParallel(model.to(world.device))
"""

from __future__ import annotations

import atexit
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from mpiddp.errors import UserError
from mpiddp.runtime.coordinator import Coordinator, Refused
from mpiddp.runtime.join import is_failure, join
from mpiddp.runtime.script_exit import observe
from mpiddp.runtime.session import current
from mpiddp.world import World

COLLECTIVE_TIMEOUT_S = 600.0
BACKENDS = ("nccl", "gloo")


@contextlib.contextmanager
def process_group(
    world: World | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    keep_mpi: bool = False,
) -> Iterator[World]:
    """The job's default process group, formed from whatever launcher started this process.

    Args:
        world: this process's place in the job, where it is known; by default read from the environment.
        backend: "nccl" or "gloo"; by default nccl where there is a GPU, else gloo.
        timeout_s: how long a collective may wait for a peer before the job fails.
        keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.

    Yields:
        The world, with all of its fields known.

    Raises:
        UserError: no launcher that makes sense, a foreign MPI, ranks that do not join.
        SystemExit: code 2, on every rank, once rank 0 has said what is wrong.
    """
    with join(world, keep_mpi=keep_mpi) as coordinator:
        with coordinator.all_or_none():
            backend = choose_backend(backend)
            device = device_of(coordinator.world, backend)
        with coordinator.all_or_none():
            coordinator.require_equal(
                "the backend", backend, hint="Name one: --backend gloo, or nccl."
            )
        with default_group(coordinator, backend, device, timeout_s=timeout_s):
            yield replace(coordinator.world, backend=backend, device=str(device))


def init(
    *,
    backend: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    keep_mpi: bool = False,
) -> World:
    """`process_group()` for a script without a `with`: the group lasts until the interpreter exits.

    Returns what `process_group` yields, and raises what it raises.

    Under a plain mpirun only `sys.exit` and an uncaught error tell the other ranks how this one ended;
    `process_group()`, and `mpiddp launch`, hear of every end.
    """
    group = process_group(backend=backend, timeout_s=timeout_s, keep_mpi=keep_mpi)
    world = group.__enter__()
    what_ended_it = observe()

    def leave() -> None:
        error = what_ended_it()
        group.__exit__(type(error) if error else None, error, None)

    atexit.register(leave)
    return world


@contextlib.contextmanager
def default_group(
    coordinator: Coordinator, backend: str, device: torch.device, *, timeout_s: float
) -> Iterator[None]:
    """The default process group of torch.distributed over the coordinator's store, destroyed at the end."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL looks: else every rank opens a context on GPU 0
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(coordinator.unique_prefix("group"), coordinator.store),
        rank=coordinator.world.rank,
        world_size=coordinator.world.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    session, destroys = current(), True
    try:
        yield
    except (Exception, SystemExit) as error:
        fails = not isinstance(error, Refused) and is_failure(error, session.stop)
        if session.is_of_this_process and fails:
            coordinator.claim_first_failure()  # asked before the group's end lets the others fail as well
            # NCCL's end would wait for the collective that the others are in, and nobody be told.
            destroys = backend != "nccl"
        raise
    finally:
        if destroys and session.is_of_this_process:
            dist.destroy_process_group()


def choose_backend(requested: str | None) -> str:
    """The backend to use: `requested`, or nccl where there is a GPU, else gloo."""
    has_gpu = torch.cuda.is_available()
    if requested == "nccl" and not has_gpu:
        raise UserError(
            f"--backend nccl needs a GPU, and torch {torch.__version__} sees none on "
            f"{socket.gethostname()}. Use --backend gloo, or look at nvidia-smi there."
        )
    return requested or ("nccl" if has_gpu else "gloo")


def device_of(world: World, backend: str | None = None) -> torch.device:
    """The device of this rank: nothing else in this package decides on one.

    With nccl it is the GPU of the local rank, or the only visible one where the launcher shows each
    rank its own; with gloo the CPU.

    Raises:
        UserError: more local ranks than GPUs.
    """
    if (backend or choose_backend(None)) != "nccl":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if world.local_rank < gpus:
        return torch.device("cuda", world.local_rank)
    one_each = gpus == 1 and world.launcher.name == "slurm"  # --gpus-per-task hides the others
    if one_each:
        return torch.device("cuda", 0)
    raise UserError(
        f"{world.hostname} has {gpus} GPUs but {world.local_world_size} slots: "
        "ranks would share GPUs. Give it fewer slots in the hostfile, let each rank see all GPUs "
        "(CUDA_VISIBLE_DEVICES), or use --backend gloo."
    )
