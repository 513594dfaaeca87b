"""A process beside the launcher that looks for hosts while the job runs: `--grow 10m`.

A look reads files, resolves names and logs in to hosts, any of which may hang. The launcher only sends a line
for each look, and waits for the answer as for any message. The process ends with the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict

from mpiddp.hosts.pidfd import opened
from mpiddp.hosts.processes import signal_at_parents_end
from mpiddp.launch.supervise.growing import Look
from mpiddp.launch.supervise.signals import STOP_SIGNALS

_NAME = b"mpiddp-grow"  # at most 15 bytes
_PR_SET_NAME = 15  # linux/prctl.h
_CHUNK = 1 << 16


class WatchProcess:
    """A copy of this process that calls `look` with each number that it is asked for.

    A copy of a process has one thread. So create it while the others only wait for input and hold no lock.
    """

    def __init__(self, look: Callable[[int | None], Look]) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._requests)
                os.close(self._answers)
                _serve(look, requests, answers)
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)
        os.set_blocking(self._answers, False)
        self._buffer = b""
        self._stack = contextlib.ExitStack()
        self._signal = self._stack.enter_context(opened(self._pid))

    def fileno(self) -> int:
        return self._answers

    def ask(self, max_ranks: int | None) -> None:
        """Ask for a look. Does not wait."""
        with contextlib.suppress(BrokenPipeError):  # `receive` reports its end
            os.write(self._requests, f"{json.dumps(max_ranks)}\n".encode())

    def receive(self) -> list[Look]:
        """The answers that have arrived. Raises EOFError if the process has ended."""
        try:
            chunk = os.read(self._answers, _CHUNK)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [Look(**json.loads(line)) for line in lines]

    def close(self) -> None:
        """End the process, and the programs that it has started."""
        os.close(self._requests)
        os.close(self._answers)
        # Whoever reaps the launcher's children may have reaped it, and another process may have its pid.
        with self._stack, contextlib.suppress(ProcessLookupError, ChildProcessError):
            self._signal(signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # it had not become a group yet
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(look: Callable[[int | None], Look], requests: int, answers: int) -> None:
    """Answer each line of `requests`, until their end."""
    signal_at_parents_end(signal.SIGKILL)
    signal.set_wakeup_fd(-1)  # the launcher's
    for number in STOP_SIGNALS:  # they are meant for the launcher
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what a look logs is of no interest: a restart logs it again
        os.dup2(null, descriptor)
    with open(requests) as lines:
        for line in lines:
            try:
                found = look(json.loads(line))
            except Exception as error:  # the next look may succeed
                found = Look(problem=f"a look for hosts failed: {type(error).__name__}: {error}")
            os.write(answers, f"{json.dumps(asdict(found))}\n".encode())
