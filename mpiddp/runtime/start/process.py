"""Set up a rank's process before it loads torch: its GPUs, its cores, its threads, and malloc.

A variable of OpenMP or of glibc that the user has set takes precedence.
"""

from __future__ import annotations

import ctypes
import os

from mpiddp.protocol.variables import BIND, GPUS
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
