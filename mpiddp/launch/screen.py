"""Where the launcher's stdout or stderr leads to: a terminal, a file or a pipe, which many sources share.

Where one rank is shown, its bytes pass as they come, with its prefix at the beginning of each line. Where
several are, only whole lines pass. A line that is still open is then shown below all others on a terminal,
and, once it has been quiet for a second, as a line of its own in a file or a pipe. A line that a rank has
drawn over and over, with "\\r", is shown as it looks in the end.

A terminal also has a status below all lines, while no other line is open there.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mpiddp.launch import log
from mpiddp.protocol.messages import LONGEST_LINE

_QUIET_S = 1.0
_TURN_S = 1.0  # of waiting for a reader
_LOCKED_S = 0.2  # longer than a thread takes to write to a reader that reads
_ERASED = b"\r\x1b[J"  # the terminal's line of the cursor, and those below
_UP = b"\x1b[%dA"
# The status is drawn at least once a second. After a longer time this process was stopped (Ctrl-Z), and the
# lines above the cursor are a shell's.
_STOPPED_S = 3.0
# What follows is cut at the right margin, and no longer.
_CUT, _WRAPPED = b"\x1b[?7l", b"\x1b[0m\x1b[?7h"
_REDRAWN = re.compile(rb"\r(?!\n)")
# torch writes each line of a traceback behind "[rank1]: ". The prefix says it, so it is said once.
_TORCH = re.compile(rb"^\[rank(\d+)\]: ?", re.MULTILINE)


@dataclass(eq=False)
class Source:
    """A stream of a rank, or of mpirun (rank -1), and its line that is still open."""

    rank: int
    prefix: bytes = b""
    line: bytearray = field(default_factory=bytearray)
    changed_at: float = 0.0
    shown: int = 0  # bytes of the open line that are shown as a line of their own


class Screen:
    """The file descriptor `target`, the launcher's `name`. Any thread may write.

    A reader that goes away loses the output, not the job. One that reads no more, as a pager or a terminal
    after Ctrl-S, makes the threads wait that copy output, but not `log` and `show_status`: the event loop
    that calls these has to stop the job in time.

    Args:
        is_shared: several ranks are shown here.
    """

    def __init__(self, target: int, name: str, *, is_shared: bool) -> None:
        self._name = name
        self._is_shared = is_shared
        self._is_terminal = os.isatty(target) and os.environ.get("TERM", "dumb") != "dumb"
        self._target: int | None = os.dup(target)
        self._lock = threading.Lock()
        self._unsaid: deque[bytes] = deque()  # lines of the launcher that wait for the reader
        self._rest = b""  # of a text whose beginning is written
        self._waits = True  # for the reader
        self._has_complained = False
        self._at: Source | None = None  # whose open line the cursor is in, unless it is shared
        self._open: set[Source] = set()  # with an open line, if it is shared
        self._status: list[bytes] = []
        self._drawn: list[bytes] = []  # the open line and the status on the terminal
        self._drawn_at = 0.0

    @property
    def has_open_lines(self) -> bool:
        """Whether to call `show_quiet_lines` from time to time."""
        return bool(self._open) and not self._is_terminal

    def show(self, source: Source, text: bytes) -> None:
        """Show what a source has written."""
        with self._lock:
            if self._is_shared:
                self._show_lines(source, text)
            else:
                self._pass_on(source, text)
            self._say()

    def end(self, source: Source) -> None:
        """A source has ended. Its open line is shown as it is."""
        with self._lock:
            if source not in self._open:
                return
            if source.shown == len(source.line):
                self._open.discard(source)
            else:
                self._show_lines(source, b"\n")

    def show_quiet_lines(self) -> None:
        """Show the open lines that may stay open for long."""
        now = time.monotonic()
        with self._lock:
            for source in self._open:
                is_new = not source.shown and b"\r" not in source.line
                if is_new and now - source.changed_at >= _QUIET_S:
                    source.shown = len(source.line)
                    self._write(source.prefix + bytes(source.line) + b"\n")

    def log(self, sentence: str) -> None:
        """Show a line of the launcher itself, now or once its reader reads on."""
        self._unsaid.append(log.line(sentence))
        # A thread that holds the lock for longer waits for the reader, and shows the line then.
        if self._lock.acquire(timeout=_LOCKED_S):
            try:
                with self._without_waiting():
                    self._say()
            finally:
                self._lock.release()

    @property
    def columns(self) -> int:
        """Of the terminal; 0 where no status is shown."""
        if not self._is_terminal or self._target is None:
            return 0
        try:
            return os.get_terminal_size(self._target).columns
        except OSError:  # it is gone
            return 0

    def show_status(self, lines: Sequence[str]) -> None:
        """Show these lines below all others on a terminal, in place of the last ones, if it reads now."""
        if not self._is_terminal or not self._lock.acquire(timeout=_LOCKED_S):
            return
        try:
            with self._without_waiting():
                if (lines or self._status) and self._is_writable():
                    shown = [line[: self.columns - 1] for line in lines]
                    self._status = [line.encode(errors="backslashreplace") for line in shown]
                    self._draw(b"", always=True)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the open line on a terminal, since a shell's prompt follows."""
        with self._lock:
            self._status = []
            self._say()
            if self._is_terminal:
                self._write_lines(b"")
            if self._rest:
                self._write(b"")
            if self._target is not None:
                os.close(self._target)
                self._target = None

    def _say(self) -> None:
        """Show the lines of the launcher that wait."""
        while self._unsaid and (self._waits or self._is_writable()):
            self._write_lines(self._unsaid.popleft())

    def _is_writable(self) -> bool:
        """Whether a short text can be written without waiting for the reader."""
        return self._target is None or log.is_writable(self._target)

    @contextmanager
    def _without_waiting(self) -> Iterator[None]:
        """Within the body, what the reader does not read now is kept for the next write."""
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def _pass_on(self, source: Source, text: bytes) -> None:
        begin = b""
        if self._at is not source:
            # The two streams of a single rank mix as they would without a launcher.
            is_other = self._at is not None and (source.prefix or self._at.rank != source.rank)
            begin = (b"\n" if is_other else b"") + source.prefix
        self._at = None if text.endswith(b"\n") else source
        if source.prefix:
            text = _without_torch(text, source, is_midline=not begin)
            text = text[:-1].replace(b"\n", b"\n" + source.prefix) + text[-1:]
            text = _REDRAWN.sub(b"\r" + source.prefix, text)
        self._draw(begin + text)

    def _show_lines(self, source: Source, text: bytes) -> None:
        end = text.rfind(b"\n") + 1
        lines = b""
        if end:
            lines = _prefixed(bytes(source.line) + text[:end], source)
            source.line.clear()
            source.shown = 0
        source.line += text[end:]
        source.changed_at = time.monotonic()
        if len(source.line) >= LONGEST_LINE:
            lines += _prefixed(bytes(source.line) + b"\n", source)
            source.line.clear()
        if source.line:
            self._open.add(source)
        else:
            self._open.discard(source)
        self._write_lines(lines)

    def _write_lines(self, lines: bytes) -> None:
        """Write whole lines above the open line that is drawn, or below the one that the cursor is in."""
        begin = b"\n" if self._at is not None else b""
        self._at = None
        self._draw(begin + lines)

    def _draw(self, text: bytes, *, always: bool = False) -> None:
        """Write text, and draw the open line and the status below it if this is a terminal."""
        below = []
        if self._is_terminal and self._at is None:
            below = [*self._open_line(), *self._status]
        if text or always or below != self._drawn:
            erased = self._erased()
            self._drawn, self._drawn_at = below, time.monotonic()
            self._write(erased + text + b"\n".join(_CUT + line + _WRAPPED for line in below))

    def _erased(self) -> bytes:
        """What erases the lines that are drawn."""
        if not self._drawn:
            return b""
        if self._status and time.monotonic() - self._drawn_at > _STOPPED_S:
            return b"\r"
        rows = len(self._drawn)
        return (_UP % (rows - 1) if rows > 1 else b"") + _ERASED

    def _open_line(self) -> list[bytes]:
        """The open line of the lowest rank, as the terminal shows it, if there is one."""
        if not self._open:
            return []
        source = min(self._open, key=lambda source: source.rank)
        return [source.prefix + _as_drawn(bytes(source.line))]

    def _write(self, text: bytes) -> None:
        rest = memoryview(self._rest + text)
        self._rest = b""
        while rest and self._target is not None:
            if not self._waits and not self._is_writable():
                self._rest = bytes(rest)
                return
            try:
                part = rest if self._waits else rest[: select.PIPE_BUF]
                rest = rest[os.write(self._target, part) :]
            except BlockingIOError:  # another program has made it non-blocking
                log.is_writable(self._target, _TURN_S)
            except BrokenPipeError:
                os.close(self._target)
                self._target = None
                self._complain("its reader went away")
            except OSError as error:  # a full disk may have room again, so the next text is tried
                self._complain(error.strerror or str(error))
                return

    def _complain(self, reason: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.error(f"{self._name}: {reason}. The job continues, and its output there is lost.")


def _prefixed(lines: bytes, source: Source) -> bytes:
    """The lines, each behind the source's prefix and as it looks in the end."""
    prefix = source.prefix
    lines = _without_torch(lines, source)
    if b"\r" in lines:
        lines = b"".join(_as_drawn(line) + b"\n" for line in lines[:-1].split(b"\n"))
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def _without_torch(text: bytes, source: Source, *, is_midline: bool = False) -> bytes:
    """The text without torch's own prefix of this rank, if ours says the same."""
    if not source.prefix or b"[rank" not in text:
        return text
    own = str(source.rank).encode()
    head, newline, tail = text.partition(b"\n") if is_midline else (b"", b"", text)
    return head + newline + _TORCH.sub(lambda found: b"" if found[1] == own else found[0], tail)


def _as_drawn(line: bytes) -> bytes:
    """What a terminal shows of a line: what follows the last return to its beginning."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
