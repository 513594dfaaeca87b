"""A program on a test host, as a `subprocess.Popen` of this machine, and what /proc has on processes.

Processes are killed by pid, never by name.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path


class Program(subprocess.Popen[str]):
    """A Popen that sends signals to the program on the host, not to the `nsenter` that started it.

    The program has its own session. `returncode` is the program's (-N after signal N).
    """

    _inner: int | None = None

    def inner_pid(self) -> int | None:
        """The program's pid in the pid namespace of this machine, or None if it has ended."""
        while self._inner is None and self.poll() is None:
            self._inner = first_child(self.pid)
            if self._inner is None:  # nsenter has not forked yet
                time.sleep(0.001)
        return self._inner if self.poll() is None else None

    def send_signal(self, sig: int) -> None:
        if pid := self.inner_pid():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, sig)
        if sig == signal.SIGCONT:  # nsenter stops with its program
            os.kill(self.pid, sig)

    def end(self) -> None:
        """Kill the program and all processes of its session, and wait for their end."""
        if pid := self.inner_pid():
            self.send_signal(signal.SIGKILL)  # before setsid, the program has no session yet
            while members := session_members(pid):
                for member in members:
                    with suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
                time.sleep(0.001)
        self.wait()


def start_time(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot, or None if it has ended.

    Pid and start time together identify a process, because pids are reused.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: int, started: int | None) -> bool:
    """Whether the process with this pid and start time runs. A zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z" and int(fields[19]) == started


def first_child(pid: int) -> int | None:
    """The pid of the first running child of the main thread of `pid`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def session_members(session: int) -> list[int]:
    """The pids of all running processes of a session."""
    stats = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return [
        pid for pid, stat in stats.items() if stat and stat[0] != "Z" and stat[3] == str(session)
    ]


def kill_and_wait(pid: int, started: int | None) -> None:
    """Kill the process with this pid and start time, and wait until it has ended.

    The pid 1 of a pid namespace ends after all other processes in it.
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
    """Reap a process if it is a child of this one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, which may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
