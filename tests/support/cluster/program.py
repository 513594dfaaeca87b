"""A program on a test host, as a `subprocess.Popen` of this machine, and what /proc has on processes.

Processes are killed by pid, never by name.
"""

import os
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
            with suppress(ProcessLookupError):
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


def first_child(pid: int) -> int | None:
    """The pid of the first running child of the main thread of `pid`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def session_members(session: int) -> list[int]:
    """The pids of all running processes of a session."""
    members = []
    for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            state, _parent, _group, member_session, *_ = stat_of(pid)
            if state != "Z" and member_session == str(session):
                members.append(pid)
    return members


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, which may contain spaces: state, parent, …"""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
