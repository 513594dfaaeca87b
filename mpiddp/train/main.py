"""`mpiddp train`: train as one rank of a job, or alone.

The command is the same under mpirun, srun and torchrun. This module parses the options without torch, so
--help and option errors appear at once. `mpiddp.train.rank` does the rest.
"""

from __future__ import annotations

from mpiddp.errors import UserError
from mpiddp.runtime.launcher.connected import connected
from mpiddp.runtime.start.run import prepare_process
from mpiddp.train.options import TrainOptions, parse
from mpiddp.world import World


def main(argv: list[str]) -> int:
    """Train, and return the exit code: DONE, or STOPPED if the training ends early on request.

    Raises:
        UserError, SystemExit: bad input, see `mpiddp.runtime.job.coordinator`.
    """
    world = World.from_env()
    try:
        options: TrainOptions | UserError = parse(argv)
    except UserError as error:
        if world.world_size == 1:
            raise
        options = error  # the ranks report it together once they have joined
    prepare_process(world)
    with connected(world) as session:
        session.stop.declare_support()
        from mpiddp.train.rank import run_rank

        return run_rank(options, world, session)
