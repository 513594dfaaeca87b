"""Signals to a process that is never mistaken for another one, which has got its pid meanwhile.

The launcher sends the source of this file to other hosts, see `mpiddp.launch.mpirun`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(pid: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that sends a signal to the process that has this pid now.

    The caller then checks that it is the right process. Without pidfds (Linux before 5.3, a container that
    forbids them) the pid is signalled, right after that check.

    Raises:
        ProcessLookupError: it has ended. The function raises it too.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # also too many open files
        yield lambda number: os.kill(pid, number)
        return
    try:
        yield lambda number: signal.pidfd_send_signal(process, number)
    finally:
        os.close(process)


def kill_marked(mark: bytes) -> list[int]:
    """Kill all processes that were started with the environment variable `mark`, b"NAME=VALUE".

    Returns:
        The pids of those that were killed.
    """
    killed = []
    for pid in marked(mark):
        try:
            with opened(pid) as send:
                if _has(pid, mark):  # another process may have its pid by now
                    send(signal.SIGKILL)
                    killed.append(pid)
        except OSError:  # it has ended
            pass
    return killed


def marked(mark: bytes) -> list[int]:
    """The pids of all processes that were started with the environment variable `mark`, b"NAME=VALUE"."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _has(pid, mark)]


def _has(pid: int, mark: bytes) -> bool:
    """False too for a process that has ended, or belongs to another user."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
