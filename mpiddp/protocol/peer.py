"""One connection to the server of the job channel: what it has not taken yet, and what it has proved."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from dataclasses import dataclass, field

from mpiddp.protocol.channel import RANK, VALUE_LIMIT, Lines, encode
from mpiddp.protocol.messages import LINE_LIMIT, UNPROVED_LINE_LIMIT, notice_silence


@dataclass(eq=False, slots=True)
class Peer:
    """A connection, which the selector reports with this object as its data. Nothing here waits for it.

    `rank` is None until it has proved that it belongs to the job, see `admit`. `group` is the number of its
    group. One that does not read waits for few answers, so it never has twice the `limit` to read.
    """

    connection: socket.socket
    selector: selectors.BaseSelector
    since: float
    challenge: str = field(default_factory=lambda: os.urandom(16).hex())
    lines: Lines = field(default_factory=lambda: Lines(UNPROVED_LINE_LIMIT))
    rank: int | None = None
    role: str = RANK
    group: int = 0
    limit: int = VALUE_LIMIT  # bytes of a line with a value
    is_open: bool = True
    _unsent: list[bytes | memoryview] = field(default_factory=list)  # seldom more than one
    _unsent_bytes: int = 0
    _is_written: bool = False  # the selector reports when the connection takes more

    def begin(self) -> None:
        """Send the challenge. The selector reports what arrives from now on."""
        self.connection.setblocking(False)
        notice_silence(self.connection)
        self.selector.register(self.connection, selectors.EVENT_READ, self)
        self.send(encode("challenge", challenge=self.challenge))

    def admit(self, rank: int, role: str, group: int, limit: int) -> None:
        """It has proved who it is, and may send values from now on."""
        self.rank, self.role, self.group, self.limit = rank, role, group, limit
        self.lines.limit = limit + LINE_LIMIT

    def send(self, line: bytes) -> None:
        """Send a line, as much as the connection accepts. The rest follows when it accepts more."""
        self._unsent.append(line)
        self._unsent_bytes += len(line)
        if self._unsent_bytes > 2 * self.limit:
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # the next read loses it
        elif len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send more of what has not been sent."""
        try:
            while self._unsent:
                first = self._unsent[0]
                sent = self.connection.send(first)
                self._unsent_bytes -= sent
                if sent < len(first):
                    self._unsent[0] = memoryview(first)[sent:]
                    break
                del self._unsent[0]
        except BlockingIOError:
            pass
        except OSError:  # the next read fails too
            self._unsent.clear()
            self._unsent_bytes = 0
        if bool(self._unsent) is not self._is_written:
            self._is_written = not self._is_written
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_written else 0)
            self.selector.modify(self.connection, events, self)

    def release(self) -> socket.socket:
        """Serve this connection no longer, and return it."""
        self.is_open = False
        self.selector.unregister(self.connection)
        return self.connection
