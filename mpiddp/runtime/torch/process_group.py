"""The process group of a job: form it, choose its device, and leave it together."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import is_part
from mpiddp.runtime.job.coordinator import AGREE_TIMEOUT_S
from mpiddp.runtime.job.session import current
from mpiddp.runtime.join import enter_until_exit, join
from mpiddp.runtime.patches import await_gloo
from mpiddp.runtime.rendezvous.store import store_of_group
from mpiddp.world import World

COLLECTIVE_TIMEOUT_S = 600.0
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextlib.contextmanager
def process_group(
    world: World | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> Iterator[World]:
    """The default process group of the job, under any launcher. A context manager.

        with mpiddp.process_group() as world:
            model = DistributedDataParallel(model.to(world.device))

    All ranks must call it. Under `mpiddp launch` and `mpiddp run` they have joined already; else they join
    first. The group is destroyed at the end of the body, and the ranks leave together.

    Args:
        world: the world of this process; by default read from the environment.
        backend: "nccl" or "gloo"; by default that of the GPUs if there are any, else gloo.
        timeout_s: seconds that this call, and later a collective, may wait for a peer before the job fails.

    Yields:
        The world, with all of its fields set.

    Raises:
        UserError: inconsistent variables of launchers.
        JobFailed: ranks that do not join.
        SystemExit: code 2, or 1 if a machine failed, on every rank, after the reason was printed.
    """
    with join(world, timeout_s) as coordinator:
        session, world = current(), coordinator.world
        with coordinator.all_or_none():
            backend = choose_backend(backend)
            device = device_of(world, backend)
        with coordinator.all_or_none():
            backends = coordinator.all_gather_json(backend, timeout_s=AGREE_TIMEOUT_S)
            if different := coordinator.different(backends):
                sentence = f"the backend differs: {different}."
                raise UserError(sentence, fix="set it on all ranks: --backend gloo (or nccl)")
        is_gloo = backend == "gloo"
        if not is_gloo:  # before NCCL starts, or every rank opens a context on GPU 0
            torch.accelerator.set_device_index(device)
        # gloo would use the address to which the host's own name leads, also for a group of one host.
        needs_lo = world.num_nodes == 1 and _GLOO_INTERFACE not in os.environ
        os.environ |= {_GLOO_INTERFACE: "lo"} if needs_lo else {}
        try:
            dist.init_process_group(
                backend,
                store=store_of_group(coordinator, timeout_s),
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=None if is_gloo else device,
            )
        finally:
            if needs_lo:
                del os.environ[_GLOO_INTERFACE]
        destroys = True
        try:
            if is_gloo:
                # A rank that needs no other and ends would cut off those that still connect to it.
                dist.barrier()
            yield world._replace(backend=backend, device=str(device))
        except BaseException as error:
            # NCCL would wait for operations of the others, and delay the report.
            destroys = not session.end.of_group_begins(error) or is_gloo
            raise
        finally:
            # A script of torchrun's kind may have destroyed it itself.
            if destroys and session is current() and dist.is_initialized():
                if is_gloo:
                    await_gloo()
                dist.destroy_process_group()


def init(*, backend: str | None = None, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
    """`process_group()` for a script without a `with`: the group lasts until the interpreter exits.

    Under a plain mpirun, only mpirun sees how this process ends, and it ignores exit code 0.
    `process_group()` and `mpiddp launch` notice that, too.

    Arguments and errors are those of `process_group`. Returns the world, with all of its fields set.
    """
    group = process_group(backend=backend, timeout_s=timeout_s)
    return enter_until_exit(group)


def choose_backend(requested: str | None) -> str:
    """The backend to use: `requested`, or that of this host's GPUs (nccl, Intel's xccl), else gloo."""
    if requested == "gloo":
        return requested  # torch may know no backend of an accelerator
    gpu = torch.accelerator.current_accelerator(check_available=True)
    of_gpu = dist.get_default_backend_for_device(gpu) if gpu else None
    if requested not in (None, "nccl", of_gpu):
        raise UserError(f"backend {requested!r}: expected gloo or {of_gpu or 'nccl'}.")
    if requested == "nccl" and not torch.cuda.is_available():  # ROCm's GPUs are "cuda" too
        sentence = f"--backend nccl needs a GPU, but torch {torch.__version__} sees none on {socket.gethostname()}."
        raise UserError(sentence, fix="--backend gloo, or run nvidia-smi there")
    return requested or of_gpu or "gloo"


def device_of(world: World, backend: str) -> torch.device:
    """The device of this rank. Only this function decides on it.

    With gloo it is the CPU, else the GPU of the local rank, or the only visible GPU if each rank has its own.
    """
    if backend == "gloo":
        return torch.device("cpu")
    gpu, gpus = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    assert world.local_rank is not None, "the ranks have joined"
    # For example with srun --gpus-per-task.
    has_own = gpus == 1 and (
        world.launcher.hides_gpus or is_part(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    )
    index = 0 if has_own else world.local_rank
    if gpu is not None and index < gpus:
        return torch.device(gpu.type, index)
    raise UserError(
        f"{world.hostname} has {gpus} GPUs but {world.local_world_size} slots: ranks would share GPUs.",
        fix="fewer slots in the hostfile, all GPUs visible to each rank (CUDA_VISIBLE_DEVICES), or --backend gloo",
    )
