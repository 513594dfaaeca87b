"""A rank of `mpiddp bench rendezvous`: it meets the others, and says when it knew of all of them.

Without --torch nothing of torch is loaded: what is left is Python, MPI and the exchange over it.
"""

from __future__ import annotations

import os
import time

from mpiddp.bench.machine import peak_bytes
from mpiddp.bench.rendezvous import rank_options
from mpiddp.bench.words import emit
from mpiddp.rendezvous import meet_over_mpi
from mpiddp.world import World


def run(world: World, argv: list[str]) -> None:
    options = rank_options().parse_args(argv)
    if options.torch:
        from mpiddp.group import assemble

        ready_at = time.time()
        with assemble(world):
            _tell(world, ready_at)
        return
    ready_at = time.time()
    meeting = meet_over_mpi(world, timeout_s=float(os.environ["MPIDDP_TIMEOUT"]))
    _tell(world, ready_at)
    if meeting.listener is not None:
        meeting.listener.close()


def _tell(world: World, ready_at: float) -> None:
    met_at, peak_mb = time.time(), peak_bytes(os.getpid()) / 1e6
    emit({"rank": world.rank, "ready_at": ready_at, "met_at": met_at, "peak_mb": peak_mb})
