"""The Python stack of a rank whose native code keeps the interpreter's lock.

The launcher sends one urgent byte of TCP. The kernel turns it into SIGURG, and faulthandler's handler
writes the main thread's stack to the connection. No Python code runs for that.

A plain message is not enough: the thread that would read it waits for the lock (CPython 3.11;
not where it is built without the lock). tests/test_still_needed.py fails on the day that it does not.
"""

from __future__ import annotations

import faulthandler
import fcntl
import signal
import socket
import struct
import threading

from mpiddp.protocol import URGENT

_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # linux/fcntl.h


def write_stack_on_urgent_byte(connection: socket.socket) -> None:
    """Write the main thread's stack to the connection whenever an urgent byte arrives there.

    The signal goes to the main thread, to write its own stack alone. Another thread's stack may change
    while it is read, which is a segmentation fault in a rank that was only slow to answer.
    """
    owner = struct.pack("ii", _F_OWNER_TID, threading.main_thread().native_id)
    fcntl.fcntl(connection, _F_SETOWN_EX, owner)
    faulthandler.register(signal.SIGURG, file=connection.fileno(), all_threads=False)


def without_urgent_bytes(chunk: bytes) -> bytes:
    """What was received, without the urgent bytes that the kernel has left in the stream.

    It takes one out only if it is read before the next one arrives.
    """
    return chunk.replace(URGENT, b"")
