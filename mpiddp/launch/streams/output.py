"""Copy what the ranks, mpirun and the launcher itself write to this process's stdout and stderr.

Each stream that is shown of a rank has a connection from the rank's output process
(`mpiddp.runtime.output`). What MPI and ssh print comes through mpirun's own pipes, which
this process reads until the end: mpirun aborts when the reader of its output goes away, as `tee` does at the
Ctrl-C of `… 2>&1 | tee log`. A slow reader still slows the ranks, because a thread reads no more than it
has written.
"""

from __future__ import annotations

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
from mpiddp.launch.streams.screen import Screen, Source
from mpiddp.launch.streams.tail import Tail
from mpiddp.protocol.messages import FRAME, LONGEST_LINE, STREAMS, is_shown
from mpiddp.text import escaped

_CHUNK = 1 << 16  # bytes, the size of a pipe
_TICK_S = 0.25
_QUIET_S = 1.0  # until a message of mpirun counts as complete though its last line is missing

# What an mpirun says about the end of a rank, and what Hydra adds below. Both stand between two rules.
_RULE = re.compile(rb"(-{60,}|={60,})\s*")
_ABOUT_THE_END = re.compile(
    rb"^\S+ detected that one or more processes exited with non-zero|^\S+ noticed that process rank|"
    rb"^Primary job\s+terminated normally, but|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
    re.MULTILINE,
)
_ADDED = re.compile(
    rb"\s*|YOUR APPLICATION TERMINATED WITH THE EXIT .*\s*|This typically refers to a problem with your "
    rb"application\.\s*|Please see the FAQ page for debugging suggestions\s*"
)
_LONGEST_MESSAGE = 30  # lines


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr: another file would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


class EndMessage:
    """Holds back what mpirun says about the end of a rank until the verdict is known, which says it better.

    What mpirun prints after that waits with it, so the order stays. Everything else passes at once, except
    that a text below a rule waits for the second rule, and never for longer than `_QUIET_S`.

    Args:
        shows_end: it holds nothing back, for a user who wants to see all.
    """

    def __init__(self, *, shows_end: bool = False) -> None:
        self._shows_end = shows_end
        self._rest = b""  # an incomplete line that may become a rule, or that waits
        self._is_midline = False  # the beginning of the present line has passed
        self._lines: list[bytes] = []  # that may become such a message
        self._held: list[tuple[bytes, bool]] = []  # texts, and whether each is such a message

    @property
    def is_open(self) -> bool:
        """Whether to call `release` once nothing more has come for a while."""
        return bool(self._lines or self._rest) and not self._held

    def add(self, text: bytes) -> bytes:
        """What passes at once, now that `text` has come."""
        if self._shows_end:
            return text
        *lines, self._rest = (self._rest + text).split(b"\n")
        passed = b"".join(self._add_line(line + b"\n") for line in lines)
        if self._lines or self._held or not self._rest or self._rest[:1] in b"-=":
            return passed
        return passed + self._pass_rest()

    def release(self) -> bytes:
        """What passes because nothing follows."""
        passed = self._close() if self._lines else b""
        return passed if self._held else passed + self._pass_rest()

    def settle(self, *, is_said: bool) -> tuple[bytes, bytes]:
        """What is left to show at the end, and what is not, because the verdict has said it."""
        passed = self.release()
        held = [*self._held, (self._rest, False)]
        shown = b"".join(text for text, is_message in held if not (is_message and is_said))
        left_out = b"".join(text for text, is_message in held if is_message and is_said)
        return passed + shown, left_out

    def _add_line(self, line: bytes) -> bytes:
        if self._is_midline:
            self._is_midline = False
            return line
        self._lines.append(line)
        rules = sum(bool(_RULE.fullmatch(each)) for each in self._lines)
        is_blank = len(self._lines) == 1 and not line.strip()  # Hydra's begins with an empty line
        if is_blank or (rules == 1 and len(self._lines) < _LONGEST_MESSAGE):
            return b""
        return self._close()

    def _close(self) -> bytes:
        text = b"".join(self._lines)
        self._lines = []
        is_message = bool(_ABOUT_THE_END.search(text))
        if not (self._held or is_message):
            return text
        self._held.append((text, is_message or bool(_ADDED.fullmatch(text))))
        return b""

    def _pass_rest(self) -> bytes:
        passed, self._rest = self._rest, b""
        self._is_midline = self._is_midline or bool(passed)
        return passed


class JobOutput:
    """The job's stdout and stderr, and a thread for each.

    Args:
        selection: the ranks that are shown, see `protocol.messages.is_shown`.
        has_prefix: each of their lines begins with the rank and its host.
        shows_end: see `EndMessage`.
    """

    def __init__(
        self, selection: str, world_size: int, *, has_prefix: bool = False, shows_end: bool = False
    ) -> None:
        self._has_prefix = has_prefix
        ranks = {
            stream: {rank for rank in range(world_size) if is_shown(selection, rank, stream)}
            for stream in STREAMS
        }
        groups = [(1, 2)] if _lead_to_one_place() else [(1,), (2,)]
        screens: dict[int, Screen] = {}
        for group in groups:
            count = len(set().union(*(ranks[stream] for stream in group)))
            screen = Screen(group[0], STREAMS[group[0]], is_shared=count > 1)
            screens |= dict.fromkeys(group, screen)
        self.copies = tuple(
            OutputCopy(screens[stream], EndMessage(shows_end=shows_end)) for stream in STREAMS
        )
        self._screens = screens

    def add(self, stream: int, rank: int, host: str, connection: socket.socket) -> None:
        """Show a stream of a rank, which comes through this connection."""
        prefix = f"[rank {rank} {escaped(host)}] ".encode(errors="backslashreplace")
        source = Source(rank, prefix if self._has_prefix else b"")
        self.copies[stream - 1].add(_Connection(connection, source))

    def log(self, sentence: str, *, is_error: bool) -> None:
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

    @property
    def stderr(self) -> Tail:
        """The end of what was shown there."""
        return self.copies[1].tail

    @property
    def latest(self) -> dict[int, bytes]:
        """By rank: the end of what it has printed last."""
        found: dict[int, tuple[float, bytes]] = {}
        for copy in self.copies:
            for rank, last in copy.tail.latest.copy().items():
                found[rank] = max(found.get(rank, last), last)
        return {rank: text for rank, (_, text) in found.items()}

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
        return all(copy.is_finished(within_s) for copy in self.copies)

    def settle(self, *, is_said: bool) -> bytes:
        """Show the rest of what mpirun has said, once all is finished, and close.

        Args:
            is_said: the verdict says what mpirun says about the end.

        Returns:
            What was not shown.
        """
        left_out = b"".join(copy.settle(is_said=is_said) for copy in self.copies)
        self._close_screens()
        return left_out

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

    mpirun gets `pipe`, and `started` closes it here. `end_message` filters what it writes.
    """

    def __init__(self, screen: Screen, end_message: EndMessage) -> None:
        self._screen = screen
        self._end_message = end_message
        self.tail = Tail()  # of what is shown
        self._reader, self.pipe = os.pipe()
        os.set_blocking(self._reader, False)
        self._mpirun = Source(-1)
        self._mpirun_at = 0.0  # when it last wrote
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
                self._release_quiet_text()
            while reads_mpirun and self._read_mpirun(is_last=True):
                pass
        self._close()

    def _wait(self, selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
        # A loop that only ticks is idle as well.
        self._idle_since = self._idle_since or time.monotonic()
        waits = self._end_message.is_open or self._screen.has_open_lines
        ready = selector.select(_TICK_S if waits else None)
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
            self._show(connection.source, bytes(buffer[begin:end]))
            del buffer[:end]
        return True

    def _read_mpirun(self, *, is_last: bool = False) -> bool:
        """Show what mpirun has written. Whether there may be more."""
        try:
            chunk = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return not is_last
        if chunk:
            self._mpirun_at = time.monotonic()
            self._show_mpirun(self._end_message.add(chunk))
        return bool(chunk)

    def _release_quiet_text(self) -> None:
        if self._end_message.is_open and time.monotonic() - self._mpirun_at >= _QUIET_S:
            self._show_mpirun(self._end_message.release())

    def _show_mpirun(self, text: bytes) -> None:
        if text:
            self._show(self._mpirun, text)

    def _show(self, source: Source, text: bytes) -> None:
        self.tail.add(source.rank, text)
        self._screen.show(source, text)

    def settle(self, *, is_said: bool) -> bytes:
        """Show what waits for the verdict, unless that says it. Returns what was not shown."""
        shown, left_out = self._end_message.settle(is_said=is_said)
        self._show_mpirun(shown)
        self._screen.end(self._mpirun)
        return left_out

    def _close(self) -> None:
        for connection in (*self._connections, *self._new):
            connection.socket.close()
            self._screen.end(connection.source)
        os.close(self._reader)
        os.close(self._wake_reader)
