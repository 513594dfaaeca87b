"""What a rank settles for its own process before torch is loaded: its threads, and what malloc does.

Both only where the user has not settled it with a variable of OpenMP or of glibc.
"""

from __future__ import annotations

import ctypes
import os
import signal

from mpiddp.world import World

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGEST_KEPT = 1 << 30  # bytes of one block; larger ones are data sets, not the tensors of a step
LARGEST_IN_OLD_GLIBC = 32 << 20  # which refuses more


def configure_process(world: World) -> None:
    """Settle threads and memory for this rank. To be called before torch is imported."""
    limit_threads(world)
    is_settled = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if not is_settled and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", ""):
        keep_freed_memory()


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit_threads(world: World) -> None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS says otherwise.

    torch's pools are sized when it is imported. A rank that mpirun has bound to some cores uses no
    more than these.
    """
    share = (os.cpu_count() or 1) // world.local_world_size
    bound_to = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(share, bound_to))))


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: the next step needs as much.

    By default it hands the memory of a step's tensors back to the system, and the next step waits for
    every page to be found and zeroed again. With another libc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_TRIM_THRESHOLD, NEVER)
    if not mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT):
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_OLD_GLIBC)
