"""Send this process's stdin to rank 0, over a connection of its own, to its end.

mpirun gets none of it. Open MPI 5 never passes its end on, Open MPI forgets it once a rank's own stdout and
stderr have ended, and Slurm gives it to every rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time

from mpiddp.protocol.messages import GO, notice_silence

_STDIN = 0
_CHUNK = 1 << 16  # bytes
_BACKGROUND_S = 0.5  # until the next question whose the terminal is


def begin(connection: socket.socket) -> None:
    """Copy stdin to rank 0, which reads this connection, until the caller shuts it down.

    The next attempt continues where this one stops.
    """
    threading.Thread(target=_copy, args=(connection,), daemon=True).start()


def _copy(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(_STDIN, select.POLLIN)
    with connection, contextlib.suppress(OSError):  # the rank has ended, or the terminal is gone
        connection.setblocking(True)
        notice_silence(connection, is_read_slowly=True)
        if connection.recv(len(GO)) != GO:
            return
        while connection.fileno() not in dict(poll.poll()):
            if _is_in_background():
                time.sleep(_BACKGROUND_S)
            elif chunk := os.read(_STDIN, _CHUNK):
                connection.sendall(chunk)
            else:
                return


def _is_in_background() -> bool:
    """Whether a shell runs this process by `&`. A process that reads its terminal's input then is stopped."""
    try:
        return os.tcgetpgrp(_STDIN) != os.getpgrp()
    except OSError:  # no terminal
        return False
