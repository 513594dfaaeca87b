"""The streams of a script: its agent reads them, writes them to files, and sends them to the launcher.

A stream is a terminal where the launcher's is one, else a pipe. The agent never reads ahead of a slow
launcher, so a stopped terminal stops the script as a full pipe does, and nothing is lost. Without a launcher,
the script has the streams of the MPI.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from mpiddp.hosts.processes import key_of_output
from mpiddp.protocol.channel import INPUT, STREAMS
from mpiddp.protocol.terminal import Manners, Terminal
from mpiddp.runtime.job.connection import Server, connect_to_server
from mpiddp.world import World

_CHUNK = 1 << 16  # bytes, the size of a pipe
_MOST_UNSENT = 1 << 17  # bytes; then the stream is read no further
_MOST_UNFILED = 1 << 20  # bytes that wait for the name of a folder; the rest is only shown
# A script that prints many short lines would wake the agent for each.
_SHORT, _PAUSE_S = 2048, 0.005


def is_readable(file: io.FileIO | socket.socket, within_s: float = 0.0) -> bool:
    """Whether something, or the end, can be read within this time. select(2) fails above file 1,023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


class Stream:
    """A stream of a rank's child. Both its ends are made here. `rank` names the rank and its host."""

    def __init__(self, number: int, rank: str, terminal: Terminal) -> None:
        self.number, self._rank = number, rank  # `number` is its file descriptor in the child
        source, self.theirs = terminal.open(number) or os.pipe()
        # The same for both ends of a pipe.
        self.key = key_of_output(Path(f"/proc/self/fd/{self.theirs}"))
        self.source = io.FileIO(source)  # open until the end of the stream
        self.connection: socket.socket | None = None  # to a launcher that shows it
        self._file: io.FileIO | None = None
        self._unfiled = bytearray()  # read while there was no file
        self._unsent = bytearray()
        self._is_amid_line = False  # of the script
        self._has_complained = False

    def connect(self, launcher: Server, world: World) -> None:
        self.connection = connect_to_server(
            launcher, world, "output", stream=self.number, host=world.hostname
        ).connection
        self.connection.setblocking(False)

    @property
    def is_done(self) -> bool:
        """Whether it is at its end, and all has been sent."""
        return self.source.closed and not self._unsent

    def close_if_idle(self) -> None:
        """Read no more if all has been read: the program has ended, and a stranger keeps its stream open."""
        if not (self.source.closed or self._unsent or is_readable(self.source)):
            self.source.close()

    def resize(self, terminal: Terminal) -> None:
        if not self.source.closed:
            terminal.resize(self.source.fileno())

    def register(self, poll: select.poll) -> None:
        """Let `poll` report the events that `act` needs."""
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
                self.save(chunk)
                self._unsent += chunk
                self._is_amid_line = not chunk.endswith(b"\n")
            else:
                self.source.close()
        if self.connection is not None and self._unsent:
            try:
                del self._unsent[: self.connection.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # the launcher is lost, and the files still get everything
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
        self.save(self._unfiled)
        self._unfiled = bytearray()

    def say(self, sentence: str) -> None:
        """Add a line of mpiddp's own, for the launcher to show."""
        begins = "\n" if self._is_amid_line else ""
        line = f"{begins}mpiddp: {self._rank}: {sentence}\n"
        self._unsent += line.encode(errors="backslashreplace")
        self._is_amid_line = False

    def close(self) -> None:
        """Read no more of it, and tell the launcher that it has ended."""
        self.source.close()
        for file in (self.connection, self._file):
            if file is not None:
                file.close()
        self.connection = self._file = None

    def save(self, chunk: bytes | bytearray) -> None:
        """Write a chunk to the file, and do not show it."""
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
                self.say(f"its log of {STREAMS[self.number]} has a gap: {error.strerror}.")


class Input:
    """The launcher's stdin, which the script of rank 0 reads: from a terminal if it is one, else from a pipe.

    What is typed is shown by the launcher's own terminal. So that a script can ask for a password or edit a
    line, that terminal follows what the script sets here.
    """

    number = 0
    is_done = True  # the end of a rank waits for no input

    def __init__(self, terminal: Terminal) -> None:
        pair = terminal.open(0)
        self.is_terminal = pair is not None
        self.theirs, sink = pair[::-1] if pair else os.pipe()
        self.sink: int | None = sink  # None once the script, or the launcher, has ended it
        os.set_blocking(sink, False)
        self._connection: socket.socket | None = None
        self._unwritten = b""
        self._manners = Manners()

    def connect(self, launcher: Server, world: World) -> None:
        self._connection = connect_to_server(launcher, world, INPUT).connection
        self._connection.setblocking(False)

    def resize(self, terminal: Terminal) -> None:
        if self.sink is not None:
            terminal.resize(self.sink)

    def register(self, poll: select.poll) -> None:
        if self.sink is None or self._connection is None:
            return
        if not self._unwritten:
            poll.register(self._connection, select.POLLIN)
        events = select.POLLOUT if self._unwritten else 0
        if self.is_terminal or events:
            poll.register(self.sink, events | (select.POLLIN if self.is_terminal else 0))

    def act(self, ready: Mapping[int, int]) -> Manners | None:
        """Pass on what the events of poll(2) allow. Returns what the script has set, if it is new."""
        if self.sink is None or self._connection is None:
            return None
        try:
            if self.is_terminal and ready.get(self.sink, 0) & select.POLLIN:
                os.read(self.sink, _CHUNK)  # the echo
            if not self._unwritten and self._connection.fileno() in ready:
                self._unwritten = self._connection.recv(_CHUNK)
                if not self._unwritten:
                    raise EOFError
            if self._unwritten:
                self._unwritten = self._unwritten[os.write(self.sink, self._unwritten) :]
            if self.is_terminal and (manners := Manners.of(self.sink)) != self._manners:
                self._manners = manners
                return manners
        except BlockingIOError:
            pass
        except (EOFError, OSError, termios.error):  # it has ended, or nobody reads it any more
            self.close()
        return None

    def close(self) -> None:
        if self.sink is not None:
            os.close(self.sink)
            self.sink = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
