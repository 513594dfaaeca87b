"""A rank's end of the control channel: it reports to the launcher, and acts on the launcher's messages.

A rank does not report over stdout, which belongs to the script, or by mpirun's exit code, which cannot
be trusted. `mpiddp.protocol` defines the messages, and how both ends prove that they belong to one job.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpiddp.errors import JobFailed
from mpiddp.protocol import (
    LINE_LIMIT,
    TEXT_LIMIT,
    UNCONFIRMED_LIMIT,
    UNIX,
    dumps,
    notice_silence,
    proof,
)
from mpiddp.runtime.native_stacks import without_urgent_bytes, write_stack_on_urgent_byte
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
PROGRESS_EVERY_S = 0.5
# The errors of a line that is not a message.
_NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError)
LOST_LAUNCHER = 1  # the exit code of a rank that loses its launcher


class ControlClient:
    """This rank's connection to its launcher. A thread receives the launcher's messages."""

    def __init__(
        self,
        connection: socket.socket,
        incoming: Iterator[bytes],
        world: World,
        request_stop: Callable[[], None],
        secret: str,
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        self.world = world
        self.stopping = threading.Event()  # the launcher has requested a stop of this rank
        self._exit_now = exit_now
        self.secret = secret
        self.step = 0  # the latest step of this rank
        self.is_first: bool | None = None  # whether this rank failed first; None if unknown
        self._actions: dict[str, Callable[[dict[str, Any]], object]] = {
            "end": lambda message: exit_now(int(message["code"])),
            "stop": lambda message: self._stop(request_stop),
            "stopping": lambda message: self.stopping.set(),  # its script has got a "stop"
            "stacks": lambda message: self._send_stacks(),
            "received": lambda message: self._confirm_progress(),
        }
        self._sent_progress_at = 0.0
        self._unconfirmed = 0  # messages of progress
        self._connection = connection
        self._incoming = incoming
        self._lock = threading.Lock()
        self._is_over = False
        # A forked child that keeps the connection open would hide the death of this rank.
        os.register_at_fork(after_in_child=self._connection.close)
        write_stack_on_urgent_byte(connection)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: str, **fields: object) -> None:
        # A lost connection is left to the listening thread, which ends the process.
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(dumps(kind, **fields))

    def progress(self, step: int) -> None:
        """Report this rank's step, at most twice a second. Most calls send nothing."""
        self.step = step
        now = time.monotonic()
        is_due = now - self._sent_progress_at >= PROGRESS_EVERY_S
        if is_due and self._unconfirmed < UNCONFIRMED_LIMIT:
            self._sent_progress_at = now
            self._unconfirmed += 1
            self.send("progress", step=step)

    def _stop(self, request_stop: Callable[[], None]) -> None:
        self.stopping.set()
        request_stop()

    def _confirm_progress(self) -> None:
        self._unconfirmed = 0

    def failed(self, code: int, error: str, trace: str = "", *, is_verdict: bool = False) -> None:
        """Report that this rank failed, unless it has been reported.

        Args:
            error: a sentence; with `is_verdict` it names what failed, which may be another rank.
        """
        if self._is_over:
            return
        self._is_over = True
        self.send(
            "failed",
            code=code,
            error=error[:TEXT_LIMIT],  # the beginning is the useful part
            traceback=trace[-TEXT_LIMIT:],
            first=self.is_first,
            is_verdict=is_verdict,
        )

    def done(self) -> None:
        """Report that this rank succeeded, unless it has failed."""
        if not self._is_over:
            self._is_over = True
            self.send("done")

    def _send_stacks(self) -> None:
        self.send("stacks", text=_stacks()[-TEXT_LIMIT:], step=self.step)

    def _listen(self) -> None:
        # Whoever sends anything but messages is not the launcher.
        with contextlib.suppress(OSError, *_NO_MESSAGE):
            for line in self._incoming:
                message = json.loads(line)
                if act := self._actions.get(message["type"]):
                    act(message)
        if not self._is_over:
            world = self.world
            rank = f"rank {world.rank} on {world.hostname}"
            sentence = f"{rank}: lost the connection to the launcher; exiting.\n"
            with contextlib.suppress(OSError):
                os.write(2, sentence.encode())
            self._exit_now(LOST_LAUNCHER)


class AnotherScript(Exception):
    """Another process of this rank's command is its script."""


def connect(
    address: str,
    secret: str,
    world: World,
    request_stop: Callable[[], None],
    *,
    is_script: bool = False,
    exit_now: Callable[[int], object] = os._exit,
) -> ControlClient:
    """Connect to the launcher that listens at `address`.

    Args:
        request_stop: called in another thread when the launcher requests a stop.
        is_script: whether this process is the script of a rank's command, and not the rank itself.
        exit_now: ends this process; called in another thread.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the launcher cannot be reached.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection, incoming = _connect_once(address, secret, world.rank, is_script)
        except ConnectionRefusedError as error:
            problem: Exception = error
            break
        except (OSError, OverflowError, *_NO_MESSAGE) as error:  # OverflowError for a port
            problem = error
            if time.monotonic() > deadline:
                break
            time.sleep(_RETRY_S)  # strangers may have taken all places
        else:
            return ControlClient(connection, incoming, world, request_stop, secret, exit_now)
    host, _, port = address.rpartition(":")
    where = f"at {host} port {port}" if not address.startswith(UNIX) else f"on {address}"
    raise JobFailed(
        f"rank {world.rank} on {world.hostname} cannot reach the launcher {where} "
        f"({problem or 'no answer'}). Check that it is running and that no firewall blocks the port."
    ) from None


def _connect_once(
    address: str, secret: str, rank: int, is_script: bool
) -> tuple[socket.socket, Iterator[bytes]]:
    """Connect, and prove that this rank belongs to the job. The launcher confirms it."""
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ATTEMPT_S)
        connection.connect(address.removeprefix(UNIX))
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_ATTEMPT_S)
    try:
        notice_silence(connection)
        incoming = _lines(connection)
        challenge = json.loads(next(incoming, b""))["challenge"]
        hello = {"rank": rank, "proof": proof(secret, challenge, rank)}
        connection.sendall(dumps("hello", **hello, **({"is_script": True} if is_script else {})))
        answer = json.loads(next(incoming, b""))["type"]
        if answer == "taken":
            raise AnotherScript
        if answer != "received":
            raise ValueError("an unexpected answer")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection, incoming


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Split the stream into lines.

    `makefile` does not work here: its buffer and lock keep a forked child from closing the socket.
    """
    buffer = b""
    while chunk := connection.recv(4096):
        *lines, buffer = (buffer + without_urgent_bytes(chunk)).split(b"\n")
        yield from lines
        if len(buffer) > LINE_LIMIT:
            raise ValueError("a line that is too long")


def _stacks() -> str:
    """The Python stacks of all threads of this process except this one."""
    import traceback  # takes 5 ms, and few ranks need it

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            texts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)
