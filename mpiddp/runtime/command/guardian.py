"""The guardian of a rank's command: a small process between them, so that no process outlives the rank.

    rank ◄── socket ──► guardian ──► command, the leader of its own process group ──► its processes

The guardian starts the command and passes the rank's signals on to the command's process group. It adopts
the orphans of that group, so that it finds every process that the command has started. It ends them when
the command has ended, when the rank wants it, and when the rank is gone, even by SIGKILL. If the guardian
itself is killed, the kernel kills the command, and the rank ends the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpiddp.hosts.pidfd import has
from mpiddp.hosts.processes import KILL_S, adopt_orphans, descendants, end_all
from mpiddp.runtime.command.guardian_process import CHUNK, END_S, guard
from mpiddp.runtime.command.signals import PASSED, SignalWakeup

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# The command has this variable, and no other child of the rank.
MARK = f"{AGENT_STORE}=True".encode()
_PAUSE_S = 0.02


class Guardian:
    """The rank's side. Create it before the process has threads: it forks."""

    def __init__(self) -> None:
        rank = os.getpid()
        adopt_orphans()
        self._connection, other = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            guard(other, rank)
        other.close()
        self._buffer = b""
        self._signals = SignalWakeup(PASSED)
        self.passed: set[int] = set()  # the signals that this process got for the command

    def start(self, command: Sequence[str], env: Mapping[str, str], *, keeps_stdin: bool) -> None:
        """Start the command with this process's working folder, stdout and stderr. Call `wait` next.

        Signals to this process are the command's from now on.

        Args:
            keeps_stdin: whether it gets this process's stdin too, instead of an empty one.

        Raises:
            OSError: it cannot be started.
        """
        files = [0 if keeps_stdin and _is_open(0) else -1, 1, 2]
        message = {
            "command": list(command),
            "env": dict(env),
            "has_stdin": files[0] == 0,
            "takes_terminal": files[0] == 0 and _owns_terminal(),
        }
        self._signals.__enter__()
        with _opened_null() as null:
            open_files = [file if file >= 0 and _is_open(file) else null for file in files]
            first, *rest = _chunks(json.dumps(message).encode() + b"\n")
            socket.send_fds(self._connection, [first], open_files)
            for chunk in rest:
                self._connection.sendall(chunk)
        answer = self._receive()
        if answer is None:
            answer = {"error": [0, "the process that guards it was killed"]}
        if "error" in answer:
            self._signals.close()
            raise OSError(*answer["error"])

    def wait(self) -> int | None:
        """Pass signals on until the command has ended. All processes that it has started have ended then.

        Returns:
            Its exit code, -N if signal N has killed it; None if the guardian was killed.
        """
        arrivals = self._signals.receiver
        with contextlib.closing(self._signals), selectors.DefaultSelector() as selector:
            selector.register(arrivals, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is arrivals:
                        for number in arrivals.recv(CHUNK):
                            self.passed.add(number)
                            self._send(signal=number)
                    elif (answer := self._receive()) is None:
                        self.end()
                        return None
                    else:
                        return int(answer["ended"])

    def end(self) -> None:
        """End the command and all that it has started, and return when they have ended. Any thread may."""
        self._send(end=True)
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + END_S + KILL_S
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while not os.waitid(os.P_PID, self._pid, options) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
        # If the guardian was killed, this process has adopted what is left.
        end_all(self._left, grace_s=0.0)

    def _left(self) -> list[int]:
        left = []
        for pid in descendants(os.getpid(), but=[self._pid]):
            with contextlib.suppress(OSError):
                left += [pid] if has(pid, MARK) else []
        return left

    def request_stop(self) -> None:
        """Send the command SIGTERM, unless it has got one already. Any thread may."""
        self.passed.add(signal.SIGTERM)
        self._send(stop=True)

    def _send(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # the guardian has ended
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any] | None:
        """The guardian's next message, None if it has ended."""
        while b"\n" not in self._buffer:
            try:
                chunk = self._connection.recv(CHUNK)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _owns_terminal() -> bool:
    """Whether stdin is a terminal whose Ctrl-C this process gets: then the command has to get it instead."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _opened_null() -> Iterator[int]:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        yield null
    finally:
        os.close(null)


def _chunks(data: bytes) -> list[bytes]:
    return [data[first : first + CHUNK] for first in range(0, len(data), CHUNK)]
