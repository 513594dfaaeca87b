"""Copy what the ranks, mpirun and the launcher itself write to this process's stdout and stderr.

Each stream that is shown of a rank has a connection from the rank's output process
(`mpiddp.runtime.launcher.output_process`). What MPI and ssh print comes through mpirun's own pipes, which
this process reads until the end: mpirun aborts when the reader of its output goes away, as `tee` does at the
Ctrl-C of `… 2>&1 | tee log`. A slow reader still slows the ranks, because a thread reads no more than it
has written.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from mpiddp.launch.supervise.screen import Screen, Source
from mpiddp.protocol.messages import DEFAULT_RANKS, FRAME, LONGEST_LINE, STREAMS, is_shown
from mpiddp.text import escaped

_CHUNK = 1 << 16  # bytes, the size of a pipe
_TICK_S = 0.25


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr: another file would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@dataclass(frozen=True)
class Shown:
    """The ranks whose output is shown, see `protocol.messages.is_shown`, and whether their number is."""

    ranks: str = DEFAULT_RANKS
    has_prefix: bool = False


class Outputs:
    """The job's stdout and stderr, and a thread for each.

    Args:
        has_connections: the ranks can reach this process. Otherwise their output comes through mpirun's.
    """

    def __init__(self, shown: Shown, world_size: int, *, has_connections: bool) -> None:
        self._has_prefix = shown.has_prefix
        ranks = {
            stream: {rank for rank in range(world_size) if is_shown(shown.ranks, rank, stream)}
            for stream in STREAMS
        }
        groups = [(1, 2)] if _lead_to_one_place() else [(1,), (2,)]
        screens: dict[int, Screen] = {}
        for group in groups:
            count = len(set().union(*(ranks[stream] for stream in group)))
            is_shared = has_connections and count > 1
            screen = Screen(group[0], STREAMS[group[0]], is_shared=is_shared)
            screens |= dict.fromkeys(group, screen)
        self.copies = (OutputCopy(screens[1]), OutputCopy(screens[2]))
        self._screens = screens

    def add(self, stream: int, rank: int, host: str, connection: socket.socket) -> None:
        """Show a stream of a rank, which comes through this connection."""
        prefix = f"[rank {rank} {escaped(host)}] ".encode(errors="backslashreplace")
        source = Source(rank, prefix if self._has_prefix else b"")
        self.copies[stream - 1].add(_Connection(connection, source))

    def log(self, sentence: str) -> None:
        """Print a sentence of the launcher on stderr, on a line of its own."""
        self._screens[2].log(sentence)

    @property
    def open_ranks(self) -> list[int]:
        """The ranks with a stream that has not ended."""
        return sorted({rank for copy in self.copies for rank in copy.ranks})

    @property
    def idle_s(self) -> float:
        """For how long both threads have only waited, in seconds; 0 while a reader delays one."""
        return min(copy.idle_s for copy in self.copies)

    def discard(self) -> None:
        """mpirun cannot be started: close all files."""
        for copy in self.copies:
            copy.discard()
        self._close_screens()

    def finish(self) -> None:
        """No process of the job is left: end after what mpirun's pipes still hold. Does not wait."""
        for copy in self.copies:
            copy.finish()

    def is_finished(self, within_s: float) -> bool:
        """Whether everything has been copied. A terminal that is stopped by Ctrl-S delays it."""
        if not all(copy.is_finished(within_s) for copy in self.copies):
            return False
        self._close_screens()
        return True

    def _close_screens(self) -> None:
        for screen in set(self._screens.values()):
            screen.close()


def _lead_to_one_place() -> bool:
    first, second = os.fstat(1), os.fstat(2)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


@dataclass(eq=False)
class _Connection:
    """A stream of a rank, and the beginning of a frame that is not complete."""

    socket: socket.socket
    source: Source
    buffer: bytearray = field(default_factory=bytearray)


class OutputCopy:
    """A thread that copies one stream of the job to a screen.

    mpirun gets `pipe`, and `started` closes it here.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._reader, self.pipe = os.pipe()
        os.set_blocking(self._reader, False)
        self._mpirun = Source(-1)
        self._wake_reader, self._wake_writer = os.pipe()
        self._new: deque[_Connection] = deque()
        # Changed only by assignment, because another thread reads it.
        self._connections: set[_Connection] = set()
        self._idle_since: float | None = None
        self._is_ending = False
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def started(self) -> None:
        """mpirun has its end of the pipe: begin to copy."""
        os.close(self.pipe)
        self._thread.start()

    def discard(self) -> None:
        for file in (self.pipe, self._reader, self._wake_reader, self._wake_writer):
            os.close(file)

    def add(self, connection: _Connection) -> None:
        connection.socket.setblocking(False)
        if self._is_ending:  # its rank was given up
            connection.socket.close()
            return
        self._new.append(connection)
        os.write(self._wake_writer, b".")

    @property
    def ranks(self) -> set[int]:
        """The ranks whose stream has not ended."""
        return {each.source.rank for each in (*self._new.copy(), *self._connections)}

    @property
    def idle_s(self) -> float:
        since = self._idle_since
        return 0.0 if since is None else time.monotonic() - since

    def finish(self) -> None:
        self._is_ending = True
        os.close(self._wake_writer)

    def is_finished(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _copy(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            reads_mpirun = True
            while not self._is_ending:
                for key in self._wait(selector):
                    if isinstance(key.data, _Connection):
                        self._read(key.data, selector)
                    elif key.fd == self._reader and not self._read_mpirun():
                        selector.unregister(self._reader)
                        reads_mpirun = False
                    elif key.fd == self._wake_reader:
                        self._admit(selector)
                if self._screen.has_open_lines:
                    self._screen.show_quiet_lines()
            while reads_mpirun and self._read_mpirun(is_last=True):
                pass
        self._close()

    def _wait(self, selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
        # A loop that only ticks is idle as well.
        self._idle_since = self._idle_since or time.monotonic()
        ready = selector.select(_TICK_S if self._screen.has_open_lines else None)
        if ready:
            self._idle_since = None
        return [key for key, _ in ready]

    def _admit(self, selector: selectors.BaseSelector) -> None:
        os.read(self._wake_reader, _CHUNK)
        while self._new:
            connection = self._new[0]
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._connections = self._connections | {connection}
            self._new.popleft()

    def _read(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        try:
            chunk = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the host is gone
            chunk = b""
        connection.buffer += chunk
        if not chunk or not self._show_frames(connection):
            selector.unregister(connection.socket)
            connection.socket.close()
            self._screen.end(connection.source)
            self._connections = self._connections - {connection}

    def _show_frames(self, connection: _Connection) -> bool:
        """Show the frames that are complete. Whether the connection follows the protocol."""
        buffer, begin = connection.buffer, FRAME.size
        while len(buffer) >= begin:
            end = begin + FRAME.unpack_from(buffer)[0]
            if end > LONGEST_LINE + 2 * _CHUNK:
                return False
            if len(buffer) < end:
                break
            self._screen.show(connection.source, bytes(buffer[begin:end]))
            del buffer[:end]
        return True

    def _read_mpirun(self, *, is_last: bool = False) -> bool:
        """Show what mpirun has written. Whether there may be more."""
        try:
            chunk = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return not is_last
        if chunk:
            self._screen.show(self._mpirun, chunk)
        return bool(chunk)

    def _close(self) -> None:
        for connection in (*self._connections, *self._new):
            connection.socket.close()
            self._screen.end(connection.source)
        self._screen.end(self._mpirun)
        os.close(self._reader)
        os.close(self._wake_reader)
