"""Start the script or the command of a rank, and end it with all that it has started.

The child leads a process group of its own: a signal to the rank's group reaches the agent alone, which
passes it on once. The agent adopts the orphans of its child, so it finds every process that the child has
started. If the agent itself is killed, the kernel kills the child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from mpiddp.hosts.processes import descendants, signal_all, signal_at_parents_end
from mpiddp.runtime.job.stop import PASSED

_ERROR = struct.Struct("i")


class Child:
    """The process of a rank's script, or of its command. `status` is its exit code, -N for signal N.

    Args:
        files: by file descriptor of the child, the open file of this process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[int, int],
        *,
        is_command: bool,
    ) -> None:
        self.is_command = is_command
        self.others: set[int] = set()  # processes of the agent that are none of this one's
        self.status: int | None = None
        takes_terminal = _is_in_foreground()
        reader, writer = os.pipe()
        agent = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(argv, env, files, agent, writer, takes_terminal=takes_terminal)
        os.close(writer)
        error = os.read(reader, _ERROR.size) if is_command else b""
        os.close(reader)
        if error:
            os.waitpid(self.pid, 0)
            [number] = _ERROR.unpack(error)
            raise OSError(number, os.strerror(number))

    def pass_on(self, number: int) -> None:
        """Send it a signal: to a script alone, whose workers it ends itself, but to all of a command."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_command:
                os.killpg(self.pid, number)
            elif self.status is None:
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Collect the child and the adopted orphans that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)

    @property
    def left(self) -> dict[int, str]:
        """The child and all that it has started, as far as they still run."""
        return descendants(os.getpid(), but=self.others)

    def signal_all(self, number: int) -> None:
        signal_all(lambda: self.left, number)


def _become(
    argv: Sequence[str],
    env: Mapping[str, str],
    files: Mapping[int, int],
    agent: int,
    writer: int,
    *,
    takes_terminal: bool,
) -> NoReturn:
    """In the forked process: become the program."""
    try:
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(1)
        os.setpgid(0, 0)
        if takes_terminal:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            os.tcsetpgrp(0, os.getpid())
        for number, file in files.items():
            if number == file:
                os.set_inheritable(file, True)
            else:
                os.dup2(file, number)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the MPI's own connections
            if int(name) > 2 and int(name) not in files:
                with contextlib.suppress(OSError):  # that of the folder itself
                    os.set_inheritable(int(name), False)
        for each in (*PASSED, signal.SIGPIPE):
            if signal.getsignal(each) is not signal.SIG_IGN or each == signal.SIGPIPE:
                signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(argv[0], list(argv), env)
    except OSError as error:
        os.write(writer, _ERROR.pack(error.errno or 0))
    finally:
        os._exit(127)


def _is_in_foreground() -> bool:
    """Whether stdin is a terminal whose Ctrl-C this process gets: then the child has to get it instead."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
