"""The stdin of a rank under `mpiddp launch`: rank 0 has the launcher's, every other rank an empty one."""

from __future__ import annotations

import contextlib
import os

from mpiddp.protocol.messages import GO, INPUT
from mpiddp.runtime.job.connect import Server, connect_to_launcher
from mpiddp.world import World


def take_stdin(world: World, server: Server) -> None:
    """Replace this process's stdin. No MPI passes it on well: see `mpiddp.launch.supervise.input`.

    Raises:
        JobFailed: the launcher cannot be reached.
    """
    if world.rank == 0:
        connection, _ = connect_to_launcher(server, world, INPUT)
        with contextlib.suppress(OSError):  # the launcher is ending, so stdin is at its end
            connection.sendall(GO)  # what follows is no message
        file = connection.detach()
    else:
        file = os.open(os.devnull, os.O_RDONLY)
    if file != 0:  # as it is if stdin was closed
        os.dup2(file, 0)
        os.close(file)
