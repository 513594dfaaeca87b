"""One stream of a rank in its output process: its source, its file, and its way to the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpiddp.errors import JobFailed
from mpiddp.protocol.messages import FRAME, LONGEST_LINE, STREAMS, notice_silence
from mpiddp.runtime.job.connect import Server, connect_to_launcher
from mpiddp.world import World

_CHUNK = 1 << 16  # bytes, the size of a pipe
_MOST_UNSENT = 1 << 17  # bytes; then the stream is read no further
_MOST_UNFILED = 1 << 18  # bytes that wait for the name of a folder
_MISSING = b"\nmpiddp: %d bytes are missing here: they were printed before the folder was named.\n"


@dataclass(eq=False)
class OutputStream:
    """A stream of the rank. `source` is None after its end.

    `fallback` is the stream that the MPI gave the rank. It is used only if the launcher cannot be reached.
    """

    number: int
    source: int | None
    world: World
    connection: socket.socket | None = None
    fallback: int | None = None
    file: int | None = None
    unfiled: bytearray | None = field(default_factory=bytearray)  # None once there is a file
    dropped: int = 0  # bytes that `unfiled` could not take
    line: bytearray = field(default_factory=bytearray)  # an open line that is not in `unsent`
    line_since: float = 0.0
    unsent: bytearray = field(default_factory=bytearray)
    sent_at: float = 0.0
    has_complained: bool = False
    owed: int = 0  # bytes of the rank, at most, that are still in the source after its end

    def __post_init__(self) -> None:
        assert self.source is not None
        os.set_blocking(self.source, False)

    def connect(self, server: Server, *, is_wanted: bool) -> None:
        """Connect to the launcher if it shows this stream, and leave the MPI's stream."""
        if is_wanted:
            facts = {"stream": self.number, "host": self.world.hostname}
            try:
                self.connection, _ = connect_to_launcher(server, self.world, "output", **facts)
            except JobFailed:  # the rank reports it
                self.fallback = self.number
                return
            notice_silence(self.connection, is_read_slowly=True)
            self.connection.setblocking(False)
        os.close(self.number)

    @property
    def is_done(self) -> bool:
        return self.source is None and not self.unsent

    @property
    def is_readable(self) -> bool:
        """Whether to read more of the source now."""
        return self.source is not None and len(self.unsent) < _MOST_UNSENT

    def read_if_ready(self, ready: Mapping[int, int]) -> int:
        """Read what is there, by the events of poll(2), and return the number of bytes."""
        if self.source is None or not self.is_readable:
            return 0
        if self.source not in ready:
            self.owed = 0
            return 0
        try:
            chunk = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # the end of a terminal
            chunk = b""
        self.owed = max(0, self.owed - len(chunk))
        if chunk:
            self._save(chunk)
            self._forward(chunk)
        else:
            self.end()
        return len(chunk)

    def note_end_of_rank(self) -> None:
        """From now on, others write into the source. What the rank has written comes first."""
        self.owed = _CHUNK  # a terminal holds less
        if self.source is not None:
            with contextlib.suppress(OSError):
                self.owed = fcntl.fcntl(self.source, fcntl.F_GETPIPE_SZ)

    def end(self) -> None:
        if self.source is not None:
            os.close(self.source)
            self.source = None
            self.flush()

    def flush(self) -> None:
        """Send the line that is still open."""
        if self.line:
            self._queue(bytes(self.line))
            self.line.clear()

    def send_if_ready(self, ready: Mapping[int, int]) -> None:
        """Send more if the connection accepts more, by the events of poll(2)."""
        if self.connection is None or (number := self.connection.fileno()) not in ready:
            return
        if ready[number] & (select.POLLERR | select.POLLHUP):
            self.lose()
        else:
            self.send()

    def send(self) -> None:
        """Send as much as the connection accepts."""
        if self.connection is None:
            return
        try:
            sent = self.connection.send(self.unsent[: 4 * _CHUNK])
        except BlockingIOError:
            return
        except OSError:
            self.lose()
            return
        del self.unsent[:sent]
        self.sent_at = time.monotonic()

    def lose(self) -> None:
        """The launcher is gone. The files still get everything."""
        assert self.connection is not None
        self.connection.close()
        self.connection = None
        self.unsent.clear()
        self.line.clear()

    def write_to(self, file: int) -> None:
        """Write to this file, beginning with what was read so far."""
        if self.file is not None:
            os.close(self.file)
        self.file, before, self.unfiled = file, self.unfiled, None
        if before:
            self._save(bytes(before))
        if self.dropped:
            self._save(_MISSING % self.dropped)
            self.dropped = 0

    def _save(self, chunk: bytes) -> None:
        if self.unfiled is not None:
            kept = chunk[: _MOST_UNFILED - len(self.unfiled)]
            self.unfiled += kept
            self.dropped += len(chunk) - len(kept)
            return
        assert self.file is not None
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except OSError as error:  # a full disk may have room again, so the next chunk is tried
            if not self.has_complained:
                self.has_complained = True
                self._forward(self._complaint(error))

    def _complaint(self, error: OSError) -> bytes:
        rank = f"rank {self.world.rank} on {self.world.hostname}"
        sentence = f"{rank}: its log of {STREAMS[self.number]} has a gap: {error.strerror}."
        return f"mpiddp: {sentence}\n".encode(errors="backslashreplace")

    def _forward(self, chunk: bytes) -> None:
        if self.connection is None:
            if self.fallback is not None:
                write_all(self.fallback, chunk)
            return
        if not self.line:
            self.line_since = time.monotonic()
        end = chunk.rfind(b"\n") + 1
        self.line += chunk[:end] if end else chunk
        if end or len(self.line) >= LONGEST_LINE:
            self.flush()
        if end and end < len(chunk):
            self.line += chunk[end:]
            self.line_since = time.monotonic()

    def _queue(self, text: bytes) -> None:
        if self.connection is not None:
            self.unsent += FRAME.pack(len(text)) + text
            self.send()


def write_all(target: int, chunk: bytes) -> None:
    """Write the chunk, or what the target takes of it."""
    rest = memoryview(chunk)
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(target, rest) :]
