"""The streams of a script: its agent reads them, writes them to files, and sends them to the launcher.

The agent never reads ahead of a slow launcher, so a stopped terminal stops the script as a full pipe does,
and nothing is lost. Without a launcher, the script has the streams of the MPI.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import termios
import time
import tty
from collections.abc import Mapping
from pathlib import Path

from mpiddp.protocol.channel import STREAMS, notice_silence
from mpiddp.runtime.job.coordinator import Server, connect_to_server
from mpiddp.world import World

_CHUNK = 1 << 16  # bytes, the size of a pipe
_MOST_UNSENT = 1 << 17  # bytes; then the stream is read no further
_MOST_UNFILED = 1 << 20  # bytes that wait for the name of a folder; the rest is only shown
# A script that prints many short lines would wake the agent for each.
_SHORT, _PAUSE_S = 2048, 0.005


def _new_stream(number: int) -> tuple[int, int]:
    """The two ends of a new stream. stdout stays a terminal if it is one, since Python buffers a pipe."""
    if number == 1 and os.isatty(number):
        with contextlib.suppress(OSError, termios.error):  # a container without /dev/pts
            reader, writer = os.openpty()
            tty.setraw(writer)  # it passes all bytes on unchanged
            return reader, writer
    return os.pipe()


class Stream:
    """A stream of a rank's child: both its ends are made here. `rank` is this rank and its host."""

    def __init__(self, number: int, rank: str) -> None:
        self.number, self._rank = number, rank  # `number` is its file descriptor in the child
        source, self.theirs = _new_stream(number)  # the child closes the other end here
        self.source = io.FileIO(source)  # open until the end of the stream
        self.connection: socket.socket | None = None  # to the launcher, if it shows this stream
        self._file: io.FileIO | None = None
        self._unfiled = bytearray()  # until there is a file
        self._unsent = bytearray()
        self._has_complained = False

    def connect(self, launcher: Server, world: World) -> None:
        """Let the launcher show this stream."""
        self.connection, _ = connect_to_server(
            launcher, world, "output", stream=self.number, host=world.hostname
        )
        notice_silence(self.connection, is_read_slowly=True)
        self.connection.setblocking(False)

    @property
    def is_done(self) -> bool:
        """Whether it is at its end, and all has been sent."""
        return self.source.closed and not self._unsent

    def register(self, poll: select.poll) -> None:
        """Let `poll` report what `act` needs."""
        if not self.source.closed and len(self._unsent) < _MOST_UNSENT:
            poll.register(self.source, select.POLLIN)
        if self.connection is not None and self._unsent:
            poll.register(self.connection, select.POLLOUT)

    def act(self, ready: Mapping[int, int]) -> None:
        """Read and send what the events of poll(2) allow. Pause after a short line."""
        chunk = b""
        if not self.source.closed and self.source.fileno() in ready:
            with contextlib.suppress(OSError):  # the end of a terminal
                chunk = self.source.read(_CHUNK)
            if chunk:
                self._save(chunk)
                self._unsent += chunk
            else:
                self.source.close()
        if self.connection is not None and self._unsent:
            try:
                del self._unsent[: self.connection.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # the launcher is gone, and the files still get everything
                self.connection.close()
                self.connection = None
        if self.connection is None:
            self._unsent.clear()
        if 0 < len(chunk) < _SHORT:
            time.sleep(_PAUSE_S)

    def write_to(self, path: Path) -> None:
        """Write to this file, beginning with what was read so far. It grows at a restart."""
        before, self._file = self._file, path.open("ab", buffering=0)
        if before is not None:
            before.close()
        self._save(self._unfiled)
        self._unfiled = bytearray()

    def _save(self, chunk: bytes | bytearray) -> None:
        if self._file is None:
            self._unfiled += chunk[: _MOST_UNFILED - len(self._unfiled)]
            return
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:  # a full disk may have room again, so the next chunk is tried
            if not self._has_complained:
                self._has_complained = True
                what = f"its log of {STREAMS[self.number]} has a gap: {error.strerror}"
                self._unsent += f"mpiddp: {self._rank}: {what}.\n".encode(errors="backslashreplace")
