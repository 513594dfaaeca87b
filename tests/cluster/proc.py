"""What /proc says of processes, and how to end some of them: by pid and never by name."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone.

    Together with the pid this names one process for good: pids are used again.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: int, started: int | None) -> bool:
    """Whether the process that had `pid` and this start time lives; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z" and int(fields[19]) == started


def first_child(pid: int) -> int | None:
    """The pid of the first living child of `pid`'s main thread."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def session_members(session: int) -> list[int]:
    """The pids of all living processes of one session."""
    stats = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return [
        pid for pid, stat in stats.items() if stat and stat[0] != "Z" and stat[3] == str(session)
    ]


def kill_and_wait(pid: int, started: int | None) -> None:
    """Kills the process that had `pid` and this start time, and returns when it is gone.

    The pid 1 of a pid namespace is gone only after all others in there are.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], 10.0)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def reap(pid: int) -> None:
    """Takes the exit status of a process, if it was a child of this one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name (which may hold spaces)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
