"""A rank's end of the control channel: what it tells its launcher, and what it does when told.

Not stdout, which is the script's own, and not mpirun's exit code, which lies. `mpiddp.protocol` has the
messages and how both ends prove that they belong to one job.
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

from mpiddp.errors import UserError
from mpiddp.protocol import TEXT_LIMIT, dumps, notice_silence, proof
from mpiddp.runtime.native_stacks import without_urgent_bytes, write_stack_on_urgent_byte
from mpiddp.world import World

CONNECT_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 0.5
ORPHANED = 1  # the exit code of a rank whose launcher is gone


class ControlClient:
    """This rank's connection to its launcher, which a thread of its own listens to."""

    def __init__(
        self,
        connection: socket.socket,
        incoming: Iterator[bytes],
        world: World,
        request_stop: Callable[[], None],
    ) -> None:
        self.world = world
        self.step = 0  # how far this rank is
        self.is_first: bool | None = None  # to fail, as far as the coordinator's store knows
        self._actions: dict[str, Callable[[dict[str, Any]], None]] = {
            "end": lambda message: os._exit(int(message["code"])),
            "stop": lambda message: request_stop(),
            "stacks": lambda message: self._send_stacks(),
        }
        self._sent_progress_at = 0.0
        self._connection = connection
        self._incoming = incoming
        self._lock = threading.Lock()
        self._is_over = False
        # A child that holds the connection would hide this rank's death.
        os.register_at_fork(after_in_child=self._connection.close)
        write_stack_on_urgent_byte(connection)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: str, **facts: object) -> None:
        # Where nobody listens any more, the listening thread has noticed it as well.
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(dumps(kind, **facts))

    def progress(self, step: int) -> None:
        """Send how far this rank is, twice a second at most: in most steps it costs nothing."""
        self.step = step
        now = time.monotonic()
        if now - self._sent_progress_at >= PROGRESS_EVERY_S:
            self._sent_progress_at = now
            self.send("progress", step=step)

    def failed(self, code: int, error: str, trace: str = "") -> None:
        self._is_over = True
        self.send(
            "failed",
            code=code,
            error=error[:TEXT_LIMIT],  # its beginning is what counts
            traceback=trace[-TEXT_LIMIT:],
            first=self.is_first,
        )

    def done(self) -> None:
        self._is_over = True
        self.send("done")

    def _send_stacks(self) -> None:
        self.send("stacks", text=_stacks()[-TEXT_LIMIT:], step=self.step)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._incoming:
                message = json.loads(line)
                if act := self._actions.get(message["type"]):
                    act(message)
        if not self._is_over:
            world = self.world
            sentence = f"rank {world.rank} on {world.hostname}: the launcher is gone, so am I.\n"
            with contextlib.suppress(OSError):
                os.write(2, sentence.encode())
            os._exit(ORPHANED)


def connect(
    address: str, secret: str, world: World, request_stop: Callable[[], None]
) -> ControlClient:
    """Connect to the launcher that listens at `address`.

    Args:
        request_stop: called in another thread when the launcher asks the ranks to stop.

    Raises:
        UserError: it cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
        notice_silence(connection)
        incoming = _lines(connection)
        challenge = json.loads(next(incoming, b""))["challenge"]
        answer = proof(secret, challenge, world.rank)
        connection.sendall(dumps("hello", rank=world.rank, proof=answer))
    except (OSError, ValueError, LookupError) as error:
        raise UserError(
            f"rank {world.rank} on {world.hostname} cannot reach its launcher at {host} port {port} "
            f"({error or 'no answer'}). Is it running, and is no firewall between?"
        ) from None
    connection.settimeout(None)
    return ControlClient(connection, incoming, world, request_stop)


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Not a file object: its buffer and its lock would keep a forked child from closing the socket."""
    buffer = b""
    while chunk := connection.recv(4096):
        *whole, buffer = (buffer + without_urgent_bytes(chunk)).split(b"\n")
        yield from whole


def _stacks() -> str:
    """The Python stacks of all threads of this process but this one."""
    import traceback  # 5 ms that most ranks never need

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            texts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)
