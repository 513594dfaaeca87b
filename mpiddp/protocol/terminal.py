"""The launcher's terminal, as the ranks know it: its size, and the streams that lead to it.

In a rank's script, these streams are terminals of the same size, and all other streams are pipes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import tty
from typing import NamedTuple

from mpiddp.text import escaped

_USUAL = (80, 24)  # columns and rows, if the size is unknown


class Terminal(NamedTuple):
    """The streams, of 0 to 2, that are terminals, and their size in characters."""

    files: str = ""
    columns: int = _USUAL[0]
    rows: int = _USUAL[1]
    has_prefix: bool = False  # whether each line begins with the prefix of its rank

    @classmethod
    def of_this_process(cls) -> Terminal:
        files = "".join(str(number) for number in range(3) if os.isatty(number))
        for number in map(int, sorted(files, reverse=True)):
            with contextlib.suppress(OSError):
                columns, rows = os.get_terminal_size(number)
                if columns and rows:
                    return cls(files, columns, rows)
        return cls(files)

    def behind(self, prefix: str) -> Terminal:
        """The terminal without the columns of the prefix, so that a progress bar fits into its line."""
        return self._replace(columns=max(1, self.columns - len(prefix)))

    def open(self, number: int) -> tuple[int, int] | None:
        """A new pair of terminals, the outer and the inner, in place of stream `number`; None for a pipe."""
        if str(number) in self.files:
            with contextlib.suppress(OSError, termios.error):  # a container without /dev/pts
                outer, inner = os.openpty()
                if number > 0:
                    tty.setraw(inner)  # it passes all bytes on unchanged
                self.resize(outer)
                return outer, inner
        return None

    def resize(self, file: int) -> None:
        """Give this size to a terminal."""
        with contextlib.suppress(OSError):  # it is no terminal, or its process has ended
            fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("4H", self.rows, self.columns, 0, 0))


def prefix_of(rank: int, host: str) -> str:
    """The text before each line of a rank."""
    return f"[rank {rank} {escaped(host)}] "


def give_size(file: int) -> None:
    """Give a terminal of 0 × 0 characters, as Open MPI's are, a size: progress bars take 0 for their own."""
    with contextlib.suppress(OSError):
        if os.get_terminal_size(file) == (0, 0):
            Terminal().resize(file)


class Manners(NamedTuple):
    """Whether a terminal shows the keys that are typed, and whether it passes on whole lines only."""

    echo: bool = True
    lines: bool = True

    @classmethod
    def of(cls, file: int) -> Manners:
        flags = termios.tcgetattr(file)[3]
        return cls(bool(flags & termios.ECHO), bool(flags & termios.ICANON))

    def set(self, file: int) -> None:
        mode = termios.tcgetattr(file)
        for flag, is_on in ((termios.ECHO, self.echo), (termios.ICANON, self.lines)):
            mode[3] = mode[3] | flag if is_on else mode[3] & ~flag
        termios.tcsetattr(file, termios.TCSANOW, mode)
