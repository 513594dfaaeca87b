"""The launcher's stdout and stderr: its own lines, which begin with "mpiddp: ", and the output of the ranks.

The bytes of a single rank pass as they come. If there are several ranks or prefixes, only whole lines pass. A
line without an end is an open line. A terminal shows one open line below all others: its last state if the
rank draws it over and over, with "\\r", else its end, because the terminal may be narrower. A pipe or a file,
as in `| tee`, gets the growth of the open line once a second. A terminal has a status below all lines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpiddp.errors import fault, message

PATIENCE_S = 3.0  # the longest wait for a reader that reads nothing
_stuck: set[int] = set()  # the descriptors whose readers get nothing after this wait
is_quiet = False  # with --quiet, `info` prints nothing

LONGEST_LINE = 2 << 20  # bytes of a line, if several ranks share the screen
GROWTH_S = 1.0  # before a pipe or a file gets an open line, because its end may be on its way
_ERASED = b"\r\x1b[J"  # erases the line of the cursor and all lines below
_UP = b"\x1b[%dA"
# A nested bar of tqdm ends each drawing with it, and so moves the cursor back into the outer bar.
_NESTED = b"\x1b[A"
_UPWARDS = re.compile(rb"\x1b\[\d*A")  # to the other lines of a bar
_CODE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")  # a colour, for example: it takes no column
_MOST_CODES = 1 << 12  # bytes of codes in the part of a line that a terminal shows
_MODE = re.compile(rb"\x1b\[\?(\d+)([hl])")
_ON = (b"7", b"25")  # the margin and the cursor are on; other modes, as the full screen, are off
# From _CUT to _WRAPPED, the terminal cuts text at its right margin.
_CUT, _WRAPPED = b"\x1b[?7l", b"\x1b[0m\x1b[?7h"
# Below the first line of an error, torch prints a page of C++ frames, with symbols or without, which are left
# out, because they say nothing of the cause. torch may begin each line of a traceback with the rank.
_ABOVE_FRAMES = b"(most recent call first):"
_FRAME = re.compile(
    rb"(\[rank\d+\]: ?)?(frame #\d+: .+|#\d+ .+ from .+:\d+|C\+\+ CapturedTraceback:)"
)


def info(sentence: str) -> None:
    """Print a sentence on stderr, unless the launcher is to be quiet."""
    if not is_quiet:
        error(sentence)


def error(sentence: str) -> None:
    """Print a sentence on stderr. The job continues if the terminal has hung up.

    If the sentence quotes a rank, the quotation neither controls the terminal nor begins a line of its own.
    """
    # sys.stderr would flush again at exit, fail, and end this process with code 120.
    with contextlib.suppress(OSError):
        write_all(2, line(sentence))


def write_all(target: int, text: bytes) -> None:
    """Write all of the text. If the reader reads nothing for some seconds, it gets no text from then on."""
    rest = bytearray(b"" if target in _stuck else text)
    _send(target, rest, PATIENCE_S)
    if rest:
        _stuck.add(target)


def _send(target: int, text: bytearray, within_s: float) -> None:
    """Write as much as the reader takes, within some seconds each time, and remove it from the text."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)  # for select.PIPE_BUF bytes without a wait
    most = select.PIPE_BUF if os.get_blocking(target) else 1 << 16
    while text and poll.poll(1000 * within_s):
        with contextlib.suppress(BlockingIOError):
            del text[: os.write(target, text[:most])]


def stamp() -> str:
    """The time in front of a line, for --timestamps."""
    return time.strftime("%Y-%m-%d %H:%M:%S ")


def line(sentence: str) -> bytes:
    return f"{message(sentence)}\n".encode(errors="backslashreplace")


@dataclass(eq=False)
class Source:
    """A stream of a rank, or of MPIRUN, and its open line."""

    rank: int
    prefix: bytes = b""
    line: bytearray = field(default_factory=bytearray)
    is_redrawn: bool = False  # whether the open line is drawn again from its beginning, like a bar
    opened_at: float = 0.0  # when the line began, by time.monotonic()
    is_in_frames: bool = False  # whether its last line was a frame of C++


class Screen:
    """The file descriptor `target`, which errors call `name`. `is_shared` says that it shows several ranks.

    No write waits for the reader: text that it does not take is kept until `flush`. If the reader goes away,
    the output is lost, and the job goes on.
    """

    def __init__(
        self, target: int, name: str, *, is_shared: bool, has_stamps: bool = False
    ) -> None:
        self.file = _unshared(target)
        self._unsent = bytearray()
        self._has_stamps = has_stamps
        self.name = name
        self._is_shared = is_shared
        self.is_terminal = os.isatty(target) and os.environ.get("TERM", "dumb") != "dumb"
        self._has_complained = False
        self.has_failed = False  # whether text could not be written, for example on a full disk
        self.left_out = 0  # the number of C++ frames that were left out
        self._at: Source | None = None  # the source in whose open line the cursor is
        self._open: set[Source] = set()  # the sources with an open line
        self._status: list[bytes] = []
        self._drawn: list[bytes] = []  # the open line and the status on the terminal
        self._grown: tuple[Source, bytes] | None = None  # the open line as `show_growth` wrote it
        self._above: Source | None = None  # the source of the last lines
        self._modes: dict[bytes, bytes] = {}  # the modes of the terminal that ranks have set

    def show(self, source: Source, text: bytes) -> None:
        if not (self._is_shared or source.prefix or self._has_stamps):
            # The two streams of a single rank mix as they would without a launcher.
            is_other = self._at is not None and self._at.rank != source.rank
            self._at = None if text.endswith(b"\n") else source
            self._draw((b"\n" if is_other else b"") + text)
            return
        if not source.line:
            source.opened_at = time.monotonic()
        # Look only at the new text and the codes that it may complete: a line may grow byte by byte.
        start = max(0, len(source.line) - len(_NESTED))
        tail = source.line[start:] + text
        while _NESTED + b"\n" in tail:  # up and down again: the inner bar is drawn anew
            tail = tail.replace(_NESTED + b"\n", b"")
        source.line[start:] = tail
        end = source.line.rfind(b"\n", start) + 1
        if not end and len(source.line) >= LONGEST_LINE:
            source.line += b"\n"
            end = len(source.line)
        lines = bytes(source.line[:end])
        del source.line[:end]
        # A progress bar begins its line again with each return: keep the last drawing.
        start = 0 if end else start
        drawn_over = source.line[start:].rstrip(b"\r").rfind(b"\r") + 1
        source.is_redrawn = bool(drawn_over) or (source.is_redrawn and not end)
        del source.line[: start + drawn_over if drawn_over else 0]
        (self._open.add if source.line else self._open.discard)(source)
        if b"\r" in lines:
            lines = b"".join(_as_drawn(line) + b"\n" for line in lines[:-1].split(b"\n"))
        if source.is_in_frames or _ABOVE_FRAMES in lines:
            lines = self._without_frames(lines, source)
        prefix = self._before(source)
        self.show_lines(
            lines and prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n", source
        )

    def _without_frames(self, lines: bytes, source: Source) -> bytes:
        kept = []
        for line in lines.splitlines(keepends=True):
            if source.is_in_frames and _FRAME.fullmatch(line.rstrip()):
                self.left_out += 1
            else:
                source.is_in_frames = line.rstrip().endswith(_ABOVE_FRAMES)
                kept.append(line)
        return b"".join(kept)

    def _before(self, source: Source) -> bytes:
        return stamp().encode() * self._has_stamps + source.prefix

    def end(self, source: Source) -> None:
        """Show the open line of a source that has ended."""
        if source in self._open:
            self.show(source, b"\n")

    def show_lines(self, lines: bytes, source: Source | None = None) -> None:
        """Show whole lines, above the open line that is drawn or below the line of the cursor."""
        begin = b"\n" if self._at is not None else b""
        if lines and self._grown is not None:
            grower, text = self._grown
            written = self._before(source) + text if source is grower else b""
            if written and lines.startswith(written):
                begin, lines = b"", lines[len(written) :]
            else:
                begin = b"\r" if grower is source else b"\n"
            self._grown = None
        if lines:
            if self._above is not source:  # it must not draw over the lines of another source
                lines = _UPWARDS.sub(b"", lines)
            self._above = source
        self._at = None
        self._draw(begin + lines)

    def show_growth(self) -> None:
        """Write the open line of the lowest rank to a pipe or a file, if it has changed."""
        source = min(self._open, key=lambda source: source.rank, default=None)
        if self.is_terminal or not source or time.monotonic() < source.opened_at + GROWTH_S:
            return
        text = _as_drawn(bytes(source.line))
        if self._grown != (source, text):
            before, whole = self._grown, self._before(source) + text
            self._grown = (source, text)
            if before is None or before[0] is not source:
                self._write((b"\n" if before else b"") + whole)
            elif text.startswith(before[1]):
                self._write(text[len(before[1]) :])
            else:
                self._write(b"\r" + whole)

    def show_status(self, lines: Sequence[str]) -> None:
        """Show this status below all lines on a terminal, in place of the earlier status."""
        self._status = [line.encode(errors="backslashreplace") for line in lines]
        if self.is_terminal and not self.is_blocked:
            self._draw(b"")

    def close(self) -> None:
        """End the open lines. A single rank's line ends on a terminal alone, for the shell's prompt."""
        patience_s = 0.0 if self.is_blocked else PATIENCE_S
        self._status = []
        for source in list(self._open):
            self.end(source)
        if self.is_terminal:
            self.show_lines(b"")
            # A script that was killed may have hidden the cursor.
            for mode, state in self._modes.items():
                if state != (usual := b"h" if mode in _ON else b"l"):
                    self._write(b"\x1b[?" + mode + usual + _ERASED)
        self.flush(patience_s)
        if self.file > 2:
            os.close(self.file)

    def _draw(self, text: bytes) -> None:
        """Write text, and draw the open line of the lowest rank and the status below it on a terminal."""
        below: list[bytes] = []
        if self.is_terminal and self._at is None:
            try:
                for source in sorted(self._open, key=lambda source: source.rank)[:1]:
                    below.append(self._open_line(source))
                below += self._status
            except Exception as failed:  # the terminal has hung up, for example
                self.is_terminal, below = False, []
                error(f"{self.name} gets whole lines only from now on: {fault(failed)}.")
        is_one = not text and len(below) == len(self._drawn) == 1
        # Colours end with a drawing, so a line with codes is drawn anew.
        if is_one and below[0].startswith(self._drawn[0]) and b"\x1b" not in below[0]:
            self._write(below[0][len(self._drawn[0]) :])
            self._drawn = below
        elif text or below != self._drawn:
            rows, self._drawn = len(self._drawn), below
            erased = (_UP % (rows - 1) if rows > 1 else b"") + _ERASED if rows else b""
            self._write(erased + text + b"\n".join(_CUT + line + _WRAPPED for line in below))

    def _open_line(self, source: Source) -> bytes:
        """The open line of a source, or its end if it is wider than the terminal."""
        before = self._before(source)
        columns = os.get_terminal_size(self.file).columns or 80
        room = max(columns - len(before), 1)
        most = _MOST_CODES + 4 * room  # bytes; a terminal shows no more of them
        if source.is_redrawn or len(source.line) < room:
            return before + _as_drawn(bytes(source.line[:most]))
        line = _as_drawn(bytes(source.line[-most:]))
        plain = _CODE.sub(b"", line).decode(errors="replace")
        return before + (line if len(plain) < room else plain[1 - room :].encode())

    def _write(self, text: bytes) -> None:
        self._unsent += text
        self._modes.update(_MODE.findall(text))
        self.flush()

    @property
    def is_blocked(self) -> bool:
        """Whether the reader has not taken all text yet."""
        return bool(self._unsent)

    def flush(self, within_s: float = 0.0) -> None:
        try:
            _send(self.file, self._unsent, within_s)
        except OSError as failed:  # a full disk may have room again, so the next text is tried
            self._unsent.clear()
            if not self._has_complained:
                self._has_complained = True
                # An EIO that is not of a disk is of a terminal that has hung up.
                has_hung_up = failed.errno == errno.EIO and not stat.S_ISREG(
                    os.fstat(self.file).st_mode
                )
                is_gone = failed.errno == errno.EPIPE or has_hung_up
                self.has_failed = not is_gone
                reason = "its reader went away" if is_gone else failed.strerror
                lost = "The job continues, and its output there is lost."
                error(f"{self.name}: {reason}. {lost}")


def _unshared(target: int) -> int:
    """Open the same terminal or pipe anew, because the shell's descriptor has to stay blocking."""
    if os.isatty(target) or stat.S_ISFIFO(os.fstat(target).st_mode):
        with contextlib.suppress(OSError):  # it belongs to another user
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{target}", flags)
    return target


def _as_drawn(line: bytes) -> bytes:
    """The last drawing of a line, after its last return.

    Bars of rich would move the cursor into the line of another rank, and erase the prefix of their own.
    """
    drawn = line.rstrip(b"\r").rpartition(b"\r")[2]
    return drawn.replace(_NESTED, b"").replace(b"\x1b[2K", b"\x1b[K")
