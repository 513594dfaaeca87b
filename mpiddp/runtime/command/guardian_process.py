"""The guardian's own process: it starts the command, passes signals on, and ends all that is left.

`mpiddp.runtime.command.guardian` is the rank's end of it. They exchange lines of JSON over a socket pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

from mpiddp.hosts.processes import adopt_orphans, descendants, end_all, signal_at_parents_end
from mpiddp.runtime.command.signals import PASSED, SignalWakeup

END_S = 3.0  # for the processes to end after SIGTERM; a client of Docker first ends its container
# systemd and batch systems signal every process of a job, also the command's own. The guardian gets such a
# signal too, and then passes on no equal one within this time, before or after.
# A request of the launcher may also be due to such a signal, and come from another host.
_WITNESS_S, _REQUEST_WITNESS_S, _EQUAL_S = 0.1, 0.5, 5.0
CHUNK = 65536  # bytes of a message at once


def guard(connection: socket.socket, rank: int) -> NoReturn:
    """Be the guardian of the process `rank`, whose end of the socket pair is not `connection`."""
    try:
        GuardianProcess(connection, rank).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


class GuardianProcess:
    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._buffer = b""
        self._files: list[int] = []
        self._command: subprocess.Popen[bytes] | None = None
        # When this process got a signal that the rank did not pass on.
        self._seen: dict[int, float] = {}
        self._due: dict[int, float] = {}  # when to pass a signal on
        self._passed: set[int] = set()
        self._is_over = False

    def run(self) -> None:
        os.setpgid(0, 0)  # a signal to the rank's process group is passed on, once
        adopt_orphans()
        numbers = [number for number in PASSED if number != signal.SIGTSTP]
        with (
            SignalWakeup([*numbers, signal.SIGCHLD]) as arrivals,
            selectors.DefaultSelector() as selector,
        ):
            # The end of the connection is not enough: a process that the rank forks may hold it open.
            signal_at_parents_end(signal.SIGTERM)
            selector.register(arrivals, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            while not self._is_over and os.getppid() == self._rank:
                for key, _ in selector.select(self._timeout()):
                    if key.fileobj is arrivals:
                        for number in arrivals.recv(CHUNK):
                            self._on_signal(number)
                    else:
                        self._receive()
                self._pass_on()
            end_all(lambda: descendants(os.getpid()), grace_s=END_S)
            self._reap()
            if self._command is not None and self._command.returncode is not None:
                self._answer(ended=self._command.returncode)

    def _timeout(self) -> float | None:
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
            if self._command is not None and self._command.returncode is not None:
                self._is_over = True
        else:
            self._seen[number] = time.monotonic()

    def _reap(self) -> None:
        """Collect the command and the adopted orphans that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if self._command is not None and pid == self._command.pid:
                    self._command.returncode = os.waitstatus_to_exitcode(status)

    def _receive(self) -> None:
        try:
            chunk, files, _, _ = socket.recv_fds(self._connection, CHUNK, 3)
        except ConnectionError:
            chunk, files = b"", []
        self._files += files
        self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "command" in message:
                self._start(message)
            elif "signal" in message:
                self._due.setdefault(message["signal"], time.monotonic() + _WITNESS_S)
            elif "stop" in message:
                if signal.SIGTERM not in self._passed | self._seen.keys():
                    self._due.setdefault(signal.SIGTERM, time.monotonic() + _REQUEST_WITNESS_S)
            else:
                self._is_over = True
        if not chunk:
            self._is_over = True

    def _start(self, message: dict[str, Any]) -> None:
        guardian = os.getpid()
        stdin, stdout, stderr = self._files

        def prepare() -> None:
            signal_at_parents_end(signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(1)
            os.setpgid(0, 0)
            if message["takes_terminal"]:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
                os.tcsetpgrp(stdin, os.getpid())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*PASSED, signal.SIGTTOU})

        try:
            self._command = subprocess.Popen(
                message["command"],
                env=message["env"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=prepare,
            )
        except OSError as error:
            self._answer(error=[error.errno, error.strerror])
            self._is_over = True
        else:
            self._answer(started=True)
        for file in self._files:
            os.close(file)

    def _pass_on(self) -> None:
        """Pass the signals on that are due, unless the whole job has got them from somebody else."""
        now = time.monotonic()
        for number in [number for number, at in self._due.items() if at <= now]:
            del self._due[number]
            is_repeated = now - self._seen.get(number, float("-inf")) < _EQUAL_S
            self._passed.add(number)
            if self._command is not None and not is_repeated:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._command.pid, number)

    def _answer(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # the rank has ended
            self._connection.sendall(json.dumps(message).encode() + b"\n")
