"""Where the launcher's stdout or stderr leads to: a terminal, a file or a pipe, which many sources share.

Where one rank is shown, its bytes pass as they come, with its prefix at the beginning of each line. Where
several are, only whole lines pass. A line that has been open and quiet for a second is shown as a line of its
own, and one that a rank has drawn over and over, with "\\r", as it looks in the end.

A terminal also has a status below all lines, while no line is open there.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpiddp.launch import log
from mpiddp.protocol.messages import LONGEST_LINE

_QUIET_S = 1.0
_TURN_S = 1.0  # of waiting for a reader
_LOCKED_S = 0.2  # longer than a thread takes to write to a reader that reads
_ERASED = b"\r\x1b[J"  # the terminal's line of the cursor, and those below
_UP = b"\x1b[%dA"
_CUT, _WRAPPED = b"\x1b[?7l", b"\x1b[0m\x1b[?7h"  # at the right margin, and no longer
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
    after Ctrl-S, makes the thread wait that copies output, but not `log` and `show_status`: the event loop
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
        self._waiting: deque[bytes] = (
            deque()
        )  # lines of the launcher, for which the reader has no room
        self._has_complained = False
        self._at: Source | None = None  # whose open line the cursor is in, unless it is shared
        self._open: set[Source] = set()  # with an open line, if it is shared
        self._status: list[bytes] = []
        self._drawn = 0  # lines of it on the terminal

    @property
    def has_open_lines(self) -> bool:
        """Whether to call `show_quiet_lines` from time to time."""
        return bool(self._open)

    @property
    def columns(self) -> int:
        """Of the terminal; 0 where no status is shown."""
        if not self._is_terminal or self._target is None:
            return 0
        try:
            return os.get_terminal_size(self._target).columns
        except OSError:  # it is gone
            return 0

    def show(self, source: Source, text: bytes) -> None:
        """Show what a source has written. Waits for the reader."""
        with self._lock:
            self._write_waiting()
            if not self._is_shared:
                self._pass_on(source, text)
            elif lines := _lines(source, text):
                self._write_lines(lines)
            if source.line:
                self._open.add(source)
            else:
                self._open.discard(source)

    def end(self, source: Source) -> None:
        """A source has ended. Its open line is shown as it is."""
        if source in self._open and source.shown < len(source.line):
            self.show(source, b"\n")
        self._open.discard(source)

    def show_quiet_lines(self) -> None:
        """Show the open lines that may stay open for long."""
        now = time.monotonic()
        with self._lock:
            for source in self._open:
                is_new = not source.shown and b"\r" not in source.line
                if is_new and now - source.changed_at >= _QUIET_S:
                    source.shown = len(source.line)
                    self._write_lines(source.prefix + bytes(source.line) + b"\n")

    def log(self, sentence: str) -> None:
        """Show a line of the launcher itself, now or once its reader reads on."""
        self._waiting.append(log.line(sentence))
        # A thread that holds the lock for longer waits for the reader, and shows the line then.
        if self._lock.acquire(timeout=_LOCKED_S):
            try:
                self._write_waiting(waits=False)
            finally:
                self._lock.release()

    def show_status(self, lines: Sequence[str]) -> None:
        """Show these lines below all others on a terminal, in place of the last ones, if it reads now."""
        if not self._is_terminal or not (lines or self._status):
            return
        if self._lock.acquire(timeout=_LOCKED_S):
            try:
                if self._is_writable():
                    cut = [line[: self.columns - 1] for line in lines]
                    self._status = [line.encode(errors="backslashreplace") for line in cut]
                    self._draw(b"")
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the open line on a terminal, since a shell's prompt follows."""
        with self._lock:
            self._status = []
            self._write_waiting()
            if self._is_terminal:
                self._write_lines(b"")
            if self._target is not None:
                os.close(self._target)
                self._target = None

    def _pass_on(self, source: Source, text: bytes) -> None:
        begin = b""
        if self._at is not source:
            # The two streams of a single rank mix as they would without a launcher.
            is_other = self._at is not None and (source.prefix or self._at.rank != source.rank)
            begin = (b"\n" if is_other else b"") + source.prefix
        self._at = None if text.endswith(b"\n") else source
        if source.prefix:
            text = _without_torch(text, source) if begin else text
            text = text[:-1].replace(b"\n", b"\n" + source.prefix) + text[-1:]
            text = _REDRAWN.sub(b"\r" + source.prefix, text)
        self._draw(begin + text)

    def _write_lines(self, lines: bytes) -> None:
        """Write whole lines, below the open one that the cursor is in."""
        begin = b"\n" if self._at is not None else b""
        self._at = None
        self._draw(begin + lines)

    def _write_waiting(self, *, waits: bool = True) -> None:
        """Write the lines of the launcher, as far as the reader has room unless this waits."""
        while self._waiting and (waits or self._is_writable()):
            self._write_lines(self._waiting.popleft())

    def _is_writable(self) -> bool:
        return self._target is None or log.is_writable(self._target)

    def _draw(self, text: bytes) -> None:
        """Write text, and draw the status below it if this is a terminal."""
        erased = (_UP % (self._drawn - 1) if self._drawn > 1 else b"") + _ERASED
        below = self._status if self._is_terminal and self._at is None else []
        drawn = b"\n".join(_CUT + line + _WRAPPED for line in below)
        text = (erased if self._drawn else b"") + text + drawn
        self._drawn = len(below)
        self._write(text)

    def _write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest and self._target is not None:
            try:
                rest = rest[os.write(self._target, rest) :]
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


def _lines(source: Source, text: bytes) -> bytes:
    """The lines that this text ends, each behind the prefix and as it looks in the end."""
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
    return lines


def _without_torch(text: bytes, source: Source) -> bytes:
    """The text without torch's own prefix of this rank, if ours says the same."""
    if not source.prefix or b"[rank" not in text:
        return text
    own = str(source.rank).encode()
    return _TORCH.sub(lambda found: b"" if found[1] == own else found[0], text)


def _prefixed(lines: bytes, source: Source) -> bytes:
    prefix, lines = source.prefix, _without_torch(lines, source)
    if b"\r" in lines:
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[:-1].split(b"\n")]
        lines = b"\n".join(shown) + b"\n"
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
