"""The launcher's log: lines on stderr that begin with "mpiddp: "."""

from __future__ import annotations

import contextlib
import os

from mpiddp.text import escaped


def info(sentence: str) -> None:
    """Print a sentence on stderr. The job continues if the terminal is gone.

    It may quote a rank, which must neither control the terminal nor begin a line with "mpiddp: ".
    """
    # sys.stderr would flush again at exit, fail, and end this process with code 120.
    with contextlib.suppress(OSError):
        os.write(2, line(sentence))


def line(sentence: str) -> bytes:
    """The line that `info` prints."""
    text = escaped(sentence, keep="\n").replace("\n", "\n  ")
    return f"mpiddp: {text}\n".encode(errors="backslashreplace")
