"""A rank of `mpiddp bench rendezvous`: it joins the other ranks and reports when it had joined.

Without --torch it does not import torch, so only Python, MPI and the rendezvous over MPI are measured.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from mpiddp.bench.machine import peak_bytes
from mpiddp.bench.rendezvous import rank_options
from mpiddp.protocol.variables import TIMEOUT
from mpiddp.runtime.rendezvous.mpi import Meeting, rendezvous_over_mpi
from mpiddp.runtime.rendezvous.result import RankInfo
from mpiddp.world import World


def run(world: World, argv: list[str]) -> None:
    options = rank_options(argv)
    if options.torch:
        from mpiddp.runtime.join import join

        ready_at = time.time()
        with join(world):
            _write(world, ready_at, options.to)
        return
    ready_at = time.time()
    meeting = Meeting(lambda: RankInfo.of_this_process(world), timeout_s=float(os.environ[TIMEOUT]))
    result = rendezvous_over_mpi(world, meeting)
    _write(world, ready_at, options.to)
    if result.listener is not None:
        result.listener.close()


def _write(world: World, ready_at: float, folder: Path) -> None:
    """Write the result to a file, because Open MPI 4.1 may mix the lines of two ranks on stdout."""
    joined_at, peak_mb = time.time(), peak_bytes(os.getpid()) / 1e6
    found = {"rank": world.rank, "ready_at": ready_at, "joined_at": joined_at, "peak_mb": peak_mb}
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
