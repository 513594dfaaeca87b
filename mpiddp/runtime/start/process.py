"""Set up a rank: its GPUs, cores, threads and malloc before torch loads, its variables after it has joined.

A variable of OpenMP or of glibc that the user has set takes precedence. The others are those of torchrun, and
the network. Under torchrun itself its own stay as they are.
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
import tempfile
from pathlib import Path

from mpiddp.protocol.variables import (
    BIND,
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    GPUS,
    MAX_RESTARTS,
    RESTART_COUNT,
    RUN_ID,
)
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.world import World

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = (
    1 << 30
)  # bytes of one block; larger blocks are data sets, not the tensors of a step
_LARGEST_IN_OLD_GLIBC = 32 << 20  # an old glibc rejects a larger value


def prepare_process(world: World) -> None:
    """Configure GPUs, cores, threads and memory for this rank. Call this before torch is imported.

    Raises:
        UserError: variables of the launcher that contradict each other.
    """
    if {GPUS, BIND} & os.environ.keys():
        from mpiddp.runtime.start.own_gpu import bind_to_gpu, choose_gpus  # few ranks need it

        choose_gpus(world)
        bind_to_gpu(world)
    limit_threads(world)
    is_configured = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if not is_configured and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", ""):
        keep_freed_memory()


def limit_threads(world: World) -> int | None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS is set.

    torch sizes its thread pools when it is imported. A rank that mpirun has bound to some cores uses at
    most that many threads.

    Returns:
        The number of threads; None if the user decides, or as long as the local ranks are not counted.
    """
    if world.local_world_size is None or "OMP_NUM_THREADS" in os.environ:
        return None
    share = (os.cpu_count() or 1) // world.local_world_size
    bound_to = len(os.sched_getaffinity(0))
    threads = max(1, min(share, bound_to))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, because the next step allocates the same amount.

    By default, glibc returns the memory of a step's tensors to the system, and the next step waits until
    the kernel has found and zeroed every page again. With another libc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)


def export(result: RendezvousResult, channel: JobChannel | None) -> None:
    """Set the variables in os.environ. What the script starts may join over the channel.

    TORCHELASTIC_USE_AGENT_STORE stays unset: with it, `init_method="tcp://…"` on another port would wait
    for a store that nobody serves.
    """
    world, env = result.world, os.environ
    env.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.local_rank),
        WORLD_SIZE=str(world.world_size),
        LOCAL_WORLD_SIZE=str(world.local_world_size),
        GROUP_RANK=str(world.node_rank),
        MASTER_ADDR=str(world.master_addr),
        MASTER_PORT=str(world.master_port),
    )
    if channel is not None:
        server = channel.server.for_children()
        env.update({CHANNEL: server.address, CHANNEL_SECRET: server.key})
    if world.launcher.name != "torchrun":
        env.update(_elastic_variables(world, result.run_id))
    if result.interface:
        # gloo uses the address of the host's own name, which Debian maps to 127.0.1.1; NCCL uses the
        # first interface that it finds suitable. With "=", NCCL matches the whole name, not a prefix.
        env.setdefault("GLOO_SOCKET_IFNAME", result.interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={result.interface}")


def _elastic_variables(world: World, run_id: str) -> dict[str, str]:
    return {
        RUN_ID: run_id,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": os.environ.get(RESTART_COUNT, "0"),
        "TORCHELASTIC_MAX_RESTARTS": os.environ.get(MAX_RESTARTS, "0"),
        "GROUP_WORLD_SIZE": str(world.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.world_size),
        **_error_file(world.rank),
    }


def _error_file(rank: int) -> dict[str, str]:
    """The variable of a new file of this rank, into which torch's `@record` writes the script's error.

    No other user of the host can guess its name, and so create it before. A full disk has no place for it.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return {}
    file = Path(folder, f"mpiddp-{secrets.token_hex(16)}-{rank}-error.json")
    atexit.register(file.unlink, missing_ok=True)
    return {ERROR_FILE: str(file)}
