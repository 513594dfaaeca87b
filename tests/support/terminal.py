"""A command whose terminal the test holds.

with in_a_terminal("/bin/sh", "-c", "echo ready", cwd=folder) as job:
    assert job.until("ready").wait() == 0
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.patience import eventually
from tests.support.ranks import clean_env


class InTerminal:
    """A command whose terminal the test holds."""

    def __init__(self, pid: int, outer: int) -> None:
        self.pid, self.outer, self.shown = pid, outer, b""
        os.set_blocking(outer, False)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.outer, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def until(self, pattern: str) -> InTerminal:
        """Wait until the terminal shows this."""
        eventually(lambda: re.search(pattern.encode(), self.read()))
        return self

    def read(self) -> bytes:
        with suppress(BlockingIOError, OSError):
            while chunk := os.read(self.outer, 1 << 16):
                self.shown += chunk
        return self.shown

    def types(self, text: str) -> None:
        os.write(self.outer, text.encode())

    def wait(self) -> int:
        """Its exit code."""

        def ended() -> tuple[int, ...]:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return (status,) if pid else ()

        (status,) = eventually(ended)
        self.read()
        return os.waitstatus_to_exitcode(status)


@contextmanager
def in_a_terminal(*argv: str, cwd: Path, **env: str) -> Iterator[InTerminal]:
    """Start a command with these variables as well. The end of the block kills it."""
    variables = clean_env({"TERM": "xterm", **env})
    pid, outer = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(argv[0], argv, variables)
    job = InTerminal(pid, outer)
    try:
        job.resize(33, 120)
        yield job
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(outer)
