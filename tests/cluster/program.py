"""A program that runs inside a test host, held from outside like any `subprocess.Popen`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

from tests.cluster import proc


class Program(subprocess.Popen[str]):
    """A Popen whose signals reach the program in the host, not the `nsenter` in front of it.

    The program leads a session of its own; `returncode` is its own (-N after signal N).
    """

    _inner: int | None = None

    def inner_pid(self) -> int | None:
        """The program's pid, in the numbering of this machine; None when it has ended."""
        while self._inner is None and self.poll() is None:
            self._inner = proc.first_child(self.pid)
            if self._inner is None:  # nsenter has not forked yet
                time.sleep(0.001)
        return self._inner if self.poll() is None else None

    def send_signal(self, sig: int) -> None:
        if pid := self.inner_pid():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, sig)

    def end(self) -> None:
        """Kills a running program with all processes of its session, and waits for their end."""
        if pid := self.inner_pid():
            self.send_signal(signal.SIGKILL)  # it has no session yet where setsid has not run
            while members := proc.session_members(pid):
                for member in members:
                    with suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
                time.sleep(0.001)
        self.wait()
