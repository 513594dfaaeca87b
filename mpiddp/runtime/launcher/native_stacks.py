"""The Python stack of a rank whose native code holds the interpreter's lock.

The launcher sends one urgent byte of TCP, for which the rank's kernel raises SIGURG; on its own host it sends
the signal itself. faulthandler's handler writes the main thread's stack to the connection. No Python code
runs for that.

A plain message is not enough: the thread that would read it waits for the lock (CPython 3.11, unless
it is built without the lock). tests/integration/runtime/test_still_needed.py fails once that is no longer so.
"""

from __future__ import annotations

import faulthandler
import fcntl
import signal
import socket
import struct
import threading

_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # linux/fcntl.h


def write_stack_on_urgent_byte(connection: socket.socket) -> None:
    """Write the main thread's stack to the connection whenever an urgent byte arrives there.

    The signal goes to the main thread, which writes only its own stack. The stack of another thread may
    change while it is read, and the rank, which may only be slow to answer, would then crash.
    """
    if connection.family != socket.AF_UNIX:
        _signal_main_thread(connection)
    faulthandler.register(signal.SIGURG, file=connection.fileno(), all_threads=False)


def write_no_stack() -> None:
    """The connection's number may be another file's by now."""
    faulthandler.unregister(signal.SIGURG)


def _signal_main_thread(connection: socket.socket) -> None:
    owner = struct.pack("ii", _F_OWNER_TID, threading.main_thread().native_id)
    fcntl.fcntl(connection, _F_SETOWN_EX, owner)
