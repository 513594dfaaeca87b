"""When a rank fails: one line that names it, and an end that every MPI notices.

The traceback stays the script's own. Of several ranks that fail, the first one says so: the others'
broken connections are its consequence.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import TracebackType

from mpiddp.crew import Crew


def watch(crew: Crew) -> None:
    """From here on, an uncaught exception of this process ends the whole job.

    Hydra lets the other ranks run on after a non-zero exit, and ends them after a signal. Open MPI
    and srun end them after either.
    """
    show = sys.excepthook

    def fail(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        show(kind, error, traceback)
        if crew.is_first("failure"):
            world = crew.world
            words = f"{kind.__name__}: {error}" if str(error) else kind.__name__
            print(f"rank {world.rank} on {world.hostname} failed: {words}", file=sys.stderr)
        end_the_job(crew)

    sys.excepthook = fail


def end_the_job(crew: Crew) -> None:
    """Make sure that this process's end is everyone's. It is still to come, and goes its usual way."""
    if crew.world.launcher.name == "hydra" and crew.world.world_size > 1:
        # The very last thing: by then all that the script had to say is flushed.
        atexit.unregister(_die)
        atexit.register(_die)


def _die() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
