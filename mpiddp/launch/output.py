"""Copy what the ranks, mpirun and the launcher itself write to this process's stdout and stderr.

Each stream that is shown of a rank has a connection from the rank's agent (`mpiddp.runtime.output`). What MPI
and ssh print comes through mpirun's own pipes, which this process reads until the end: mpirun aborts when the
reader of its output goes away, as `tee` does at the Ctrl-C of `… 2>&1 | tee log`. A slow reader still slows
the ranks, because the thread that copies reads no more than it has written.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpiddp.launch import log
from mpiddp.launch.screen import Screen, Source
from mpiddp.protocol.messages import FRAME, LONGEST_LINE, STREAMS, is_shown
from mpiddp.text import escaped

_CHUNK = 1 << 16  # bytes, the size of a pipe
_TICK_S = 0.25
_HELD_S = 1.0  # for which mpirun's text waits, in case that it is about a failure
_TAIL = 1 << 16  # bytes of stderr that are kept, of all ranks
_LATEST = 256  # bytes that are kept of what each rank has written last

# What an mpirun says about the end of a rank, between two rules, and what Hydra adds below.
_BLOCK = re.compile(rb"^(-{60,}|={60,})[ \t]*\n.*?^\1[ \t]*(?:\n|\Z)", re.MULTILINE | re.DOTALL)
_ABOUT_THE_END = re.compile(
    rb"detected that one or more processes exited with non-zero|noticed that process rank|"
    rb"^Primary job\s+terminated normally, but|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
    re.MULTILINE,
)
_ADDED = re.compile(
    rb"^(?:YOUR APPLICATION TERMINATED WITH THE EXIT .*|This typically refers to a problem with your "
    rb"application\.|Please see the FAQ page for debugging suggestions)\s*\n?",
    re.MULTILINE,
)


def without_end_message(text: bytes) -> bytes:
    """What mpirun has printed, without what it says about the end of a rank."""
    shown = _BLOCK.sub(lambda found: b"" if _ABOUT_THE_END.search(found[0]) else found[0], text)
    return shown if shown == text else _ADDED.sub(b"", shown)


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr: another file would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@dataclass(eq=False)
class _Connection:
    """A stream of a rank, and the beginning of a frame that is not complete."""

    socket: socket.socket
    stream: int
    source: Source
    buffer: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Pipe:
    """What mpirun itself writes to a stream, and what of it is not shown yet."""

    file: int
    stream: int
    source: Source = field(default_factory=lambda: Source(-1))
    held: bytearray = field(default_factory=bytearray)
    since: float = 0.0


class JobOutput:
    """The job's stdout and stderr, and the thread that copies them.

    Args:
        selection: the ranks that are shown, see `protocol.messages.is_shown`.
        has_prefix: each of their lines begins with the rank and its host.
        shows_end: also show what mpirun says about the end of a rank.

    Attributes:
        pipes: the ends for mpirun, by stream. `begin` closes them here.
        latest: by rank, the end of what it has printed last. Another thread changes it.
    """

    def __init__(
        self, selection: str, world_size: int, *, has_prefix: bool = False, shows_end: bool = False
    ) -> None:
        self._has_prefix, self._shows_end = has_prefix, shows_end
        self._screens = _screens(selection, world_size)
        self.pipes: dict[int, int] = {}
        self._of_mpirun: list[_Pipe] = []
        for stream in STREAMS:
            reader, self.pipes[stream] = os.pipe()
            os.set_blocking(reader, False)
            self._of_mpirun.append(_Pipe(reader, stream))
        self._wake_reader, self._wake_writer = os.pipe()
        self._new: deque[_Connection] = deque()
        self._connections: set[_Connection] = set()  # replaced, never changed: two threads use it
        self.latest: dict[int, bytes] = {}
        self._tail: deque[tuple[int, bytes]] = deque()  # of stderr
        self._tail_size = 0
        self._has_failed = self._is_ending = False
        # Whether the thread waits, and since when. One assignment replaces both: two threads use it.
        self._state = (False, time.monotonic())
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def begin(self) -> None:
        """mpirun has its ends of the pipes: begin to copy."""
        for pipe in self.pipes.values():
            os.close(pipe)
        self._thread.start()

    def discard(self) -> None:
        """mpirun cannot be started: close all files."""
        readers = [pipe.file for pipe in self._of_mpirun]
        for file in (*self.pipes.values(), *readers, self._wake_reader, self._wake_writer):
            os.close(file)
        self._close_screens()

    def add(self, stream: int, rank: int, host: str, connection: socket.socket) -> None:
        """Show a stream of a rank, which comes through this connection."""
        if self._is_ending:  # its rank was given up
            connection.close()
            return
        connection.setblocking(False)
        prefix = f"[rank {rank} {escaped(host)}] ".encode(errors="backslashreplace")
        source = Source(rank, prefix if self._has_prefix else b"")
        self._new.append(_Connection(connection, stream, source))
        os.write(self._wake_writer, b".")

    def log(self, sentence: str, *, is_error: bool = False) -> None:
        """Print a sentence of the launcher on stderr, on a line of its own. `--quiet` leaves errors alone."""
        if is_error or not log.is_quiet():
            self._screens[2].log(sentence)

    @property
    def shows_status(self) -> bool:
        """Whether stdout and stderr are one terminal, which has room for a status."""
        is_one = self._screens[1] is self._screens[2]
        return is_one and self._screens[2].columns > 0 and not log.is_quiet()

    def show_status(self, lines: Sequence[str]) -> None:
        """Show these lines below all others there."""
        self._screens[2].show_status(lines)

    def note_failure(self) -> None:
        """A rank has failed: what mpirun prints from now on waits for the verdict."""
        self._has_failed = True

    @property
    def last_errors(self) -> dict[int, list[str]]:
        """The last lines that each rank and mpirun (-1) have printed on stderr, once all is finished."""
        texts: dict[int, bytes] = {}
        for rank, text in self._tail:
            texts[rank] = texts.get(rank, b"") + text
        if -1 in texts:  # what an mpirun says of the end of a rank is no cause
            texts[-1] = without_end_message(texts[-1])
        return {rank: text.decode("utf-8", "replace").splitlines() for rank, text in texts.items()}

    @property
    def open_ranks(self) -> list[int]:
        """The ranks with a stream that has not ended."""
        return sorted({each.source.rank for each in (*self._new.copy(), *self._connections)})

    @property
    def idle_s(self) -> float:
        """For how long the thread has only waited, in seconds; 0 while a reader delays it.

        Infinite if it has ended: it copies nothing more.
        """
        if not self._thread.is_alive():
            return float("inf")
        is_idle, since = self._state
        return time.monotonic() - since if is_idle else 0.0

    @property
    def blocked_s(self) -> float:
        """For how long the thread has been in one turn, as while nobody reads what it writes, in seconds."""
        is_idle, since = self._state
        return 0.0 if is_idle else time.monotonic() - since

    def give_up(self) -> None:
        """Read no more of the ranks, whose agents then end: nobody reads what is shown."""
        for each in (*self._new.copy(), *self._connections):
            with contextlib.suppress(OSError):  # it has ended
                each.socket.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """No process of the job is left: end after what mpirun's pipes still hold. Does not wait."""
        self._is_ending = True
        os.close(self._wake_writer)

    def is_finished(self, within_s: float) -> bool:
        """Whether everything has been copied. A terminal that is stopped by Ctrl-S delays it."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def settle(self, *, is_said: bool) -> bytes:
        """Show the rest of what mpirun has said, once all is finished, and close.

        Args:
            is_said: the verdict says what mpirun says about the end.

        Returns:
            What was not shown.
        """
        left_out = b""
        for pipe in self._of_mpirun:
            shown = bytes(pipe.held)
            if is_said and not self._shows_end:
                shown = without_end_message(shown)
                left_out += pipe.held if len(shown) < len(pipe.held) else b""
            if shown.strip():
                self._screens[pipe.stream].show(pipe.source, shown)
            self._screens[pipe.stream].end(pipe.source)
        self._close_screens()
        return left_out

    def _close_screens(self) -> None:
        for screen in set(self._screens.values()):
            screen.close()

    # --- the thread ---

    def _copy(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe in self._of_mpirun:
                selector.register(pipe.file, selectors.EVENT_READ, pipe)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._is_ending:
                if not self._state[0]:
                    self._state = (True, time.monotonic())
                ready = selector.select(_TICK_S if self._has_to_tick else None)
                if ready:
                    self._state = (False, time.monotonic())
                for key, _ in ready:
                    if isinstance(key.data, _Connection):
                        self._read(key.data, selector)
                    elif isinstance(key.data, _Pipe):
                        if not self._read_mpirun(key.data):
                            selector.unregister(key.fd)
                    else:
                        self._admit(selector)
                for screen in self._screens.values():
                    screen.show_quiet_lines()
                self._show_held()
        for pipe in self._of_mpirun:
            while self._read_mpirun(pipe, is_last=True):
                pass
            os.close(pipe.file)
        for each in (*self._connections, *self._new):
            each.socket.close()
            self._screens[each.stream].end(each.source)
        os.close(self._wake_reader)

    @property
    def _has_to_tick(self) -> bool:
        holds = any(pipe.held for pipe in self._of_mpirun) and not self._has_failed
        return holds or any(screen.has_open_lines for screen in self._screens.values())

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
            self._screens[connection.stream].end(connection.source)
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
            text = bytes(buffer[begin:end])
            self._note(connection.source.rank, connection.stream, text)
            self._screens[connection.stream].show(connection.source, text)
            del buffer[:end]
        return True

    def _note(self, rank: int, stream: int, text: bytes) -> None:
        """Keep the end of what is printed."""
        self.latest[rank] = text[-_LATEST:]
        if stream == 2:
            self._tail.append((rank, text[-_TAIL:]))
            self._tail_size += len(self._tail[-1][1])
            while self._tail_size > _TAIL:
                self._tail_size -= len(self._tail.popleft()[1])

    def _read_mpirun(self, pipe: _Pipe, *, is_last: bool = False) -> bool:
        """Keep what mpirun has written. Whether there may be more."""
        try:
            chunk = os.read(pipe.file, _CHUNK)
        except BlockingIOError:
            return not is_last
        if chunk:
            pipe.since = pipe.since if pipe.held else time.monotonic()
            pipe.held += chunk
            self._note(-1, pipe.stream, chunk)
            if len(pipe.held) > _TAIL:
                self._show_mpirun(pipe)
        return bool(chunk)

    def _show_held(self) -> None:
        """Show what mpirun has written a while ago, unless a rank has failed."""
        for pipe in self._of_mpirun:
            is_old = time.monotonic() - pipe.since >= _HELD_S
            if pipe.held and is_old and not self._has_failed:
                self._show_mpirun(pipe)

    def _show_mpirun(self, pipe: _Pipe) -> None:
        self._screens[pipe.stream].show(pipe.source, bytes(pipe.held))
        pipe.held.clear()


def _screens(selection: str, world_size: int) -> dict[int, Screen]:
    """Where each stream is shown. They share a screen if stdout and stderr lead to one place."""
    first, second = os.fstat(1), os.fstat(2)
    is_one = (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
    screens: dict[int, Screen] = {}
    for group in [(1, 2)] if is_one else [(1,), (2,)]:
        ranks = {
            rank
            for rank in range(world_size)
            if any(is_shown(selection, rank, each) for each in group)
        }
        screen = Screen(group[0], STREAMS[group[0]], is_shared=len(ranks) > 1)
        screens |= dict.fromkeys(group, screen)
    return screens
