"""The process that watches MPI, and the connection of PMIx, without an MPI.

Tests mpiddp/runtime/rendezvous/mpi.py. python -m pytest tests/unit/runtime/test_mpi_watchdog.py
"""

from __future__ import annotations

import os
import signal
import socket

from mpiddp.runtime.rendezvous.mpi import MpiWatchdog, _send_without_delay
from mpiddp.world import World

WORLD = World(0, 2, 0, 2)


def test_a_watchdog_that_was_killed_ends_no_rank() -> None:
    """A SIGTERM to every process of a job ends it, and the rank saves and stops."""
    watchdog = MpiWatchdog(WORLD, 1000)
    os.kill(watchdog._process, signal.SIGTERM)
    os.waitid(os.P_PID, watchdog._process, os.WEXITED | os.WNOWAIT)
    with watchdog.watching():
        pass


def test_a_process_that_inherits_the_pipe_holds_nobody_up() -> None:
    """The import of torch may start one."""
    watchdog = MpiWatchdog(WORLD, 1000)
    child = os.fork()
    if child == 0:
        signal.pause()
    with watchdog.watching():
        pass
    assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it still runs
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_sockets_stay_as_they_are_but_for_the_delay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as pmix, socket.create_connection(address) as other:
            socket.setdefaulttimeout(30)  # as a script may
            try:
                for end in (pmix, other):
                    end.setblocking(True)
                daemon = f"prterun-1@0.0;tcp4://127.0.0.1:{address[1]}"
                _send_without_delay({"PMIX_SERVER_URI41": daemon})
            finally:
                socket.setdefaulttimeout(None)
            assert all(os.get_blocking(end.fileno()) for end in (pmix, other, listener))
            assert pmix.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
