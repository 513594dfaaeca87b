"""Where this process is, for the launcher's look at a rank: its stacks, and what its main thread waits for.

A look comes seldom, so what only it needs is imported then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

from mpiddp.protocol.messages import MOST_UNSENT, TEXT_LIMIT

_SIOCOUTQNSD = 0x894B  # the bytes that a TCP connection could not send yet
_MOST_FILES = 4096


def look() -> dict[str, Any]:
    """The fields of a message "stacks", but for the step."""
    from mpiddp.hosts.processes import processor_time

    facts: dict[str, Any] = {"text": _stacks(), "cpu_s": 0.0, "state": _state(), "unsent": []}
    with contextlib.suppress(OSError):  # this process has no file left
        facts["cpu_s"] = processor_time(os.getpid())
        facts["unsent"] = [list(pair) for pair in sorted(_unsent())[:MOST_UNSENT]]
    return facts


def _stacks() -> str:
    """The Python stacks of all threads of this process except this one, the main thread's first."""
    import traceback  # takes 5 ms

    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
    first = stacks.pop(main or 0, "")[
        -TEXT_LIMIT:
    ]  # the end of a long stack is where the thread is
    return "\n".join([first, *stacks.values()])[:TEXT_LIMIT]


def _state() -> str:
    """That of the main thread: "D" while it waits for a disk; "" if the kernel does not tell."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0].decode()
    return ""


def _unsent() -> set[tuple[str, str]]:
    """Both addresses of the connections to other hosts that have data to send, and no room to send them."""
    found = set()
    for link in islice(Path("/proc/self/fd").iterdir(), _MOST_FILES):
        file = int(link.name)
        with contextlib.suppress(OSError):  # no connection of TCP, or it has been closed meanwhile
            if not int.from_bytes(fcntl.ioctl(file, _SIOCOUTQNSD, bytes(4)), sys.byteorder):
                continue
            with socket.socket(fileno=os.dup(file)) as connection:
                own, other = connection.getsockname()[0], connection.getpeername()[0]
            if own != other:
                found.add((own, other))
    return found
