"""Compose the command that starts a request on exactly its hosts and in its order, for each MPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpiddp.launch.starters.command import Command, Request, flag
from mpiddp.launch.starters.detect import RankStarter, StarterKind
from mpiddp.launch.starters.hydra import intel_mpi, mpich
from mpiddp.launch.starters.openmpi import open_mpi
from mpiddp.launch.starters.srun import srun

_COMPOSERS: dict[StarterKind, Callable[[RankStarter, Request], Command]] = {
    "openmpi": open_mpi,
    "mpich": mpich,
    "intelmpi": intel_mpi,
    "slurm": srun,
}


def compose(starter: RankStarter, request: Request) -> Command:
    """The command that starts `request` with `starter`."""
    command = _COMPOSERS[starter.kind](starter, request)
    if not request.mpi_args:
        return command
    theirs = flag(*request.mpi_args, why="--mpi-args, as you wrote them")
    return replace(command, flags=(*command.flags, theirs))
