"""The launcher's log: lines on stderr that begin with "mpiddp: "."""

from __future__ import annotations

import contextlib
import os

from mpiddp.text import escaped

_is_quiet = False


def be_quiet() -> None:
    """From now on, `info` prints nothing (`--quiet`)."""
    global _is_quiet
    _is_quiet = True


def is_quiet() -> bool:
    return _is_quiet


def info(sentence: str) -> None:
    """Print a sentence on stderr, unless the launcher is to be quiet."""
    if not _is_quiet:
        error(sentence)


def error(sentence: str) -> None:
    """Print a sentence on stderr. The job continues if the terminal is gone.

    It may quote a rank, which must neither control the terminal nor begin a line with "mpiddp: ".
    """
    # sys.stderr would flush again at exit, fail, and end this process with code 120.
    with contextlib.suppress(OSError):
        os.write(2, line(sentence))


def line(sentence: str) -> bytes:
    """The line that `error` prints."""
    text = escaped(sentence, keep="\n").replace("\n", "\n  ")
    return f"mpiddp: {text}\n".encode(errors="backslashreplace")
