"""Moved to `mpiddp.runtime.gpu` and `mpiddp.runtime.script`."""

import os

from mpiddp.runtime.gpu import prepare
from mpiddp.runtime.script import keep_freed_memory
from mpiddp.world import World


def prepare_process(world: World) -> None:
    """Configure GPUs, cores, threads and memory for this rank. Call this before torch is imported."""
    prepare(world)
    keep_freed_memory(os.environ)
