"""The launcher's log: lines on stderr that begin with "mpiddp: "."""

from __future__ import annotations

import contextlib
import os
import select

from mpiddp.text import escaped

_PATIENCE_S = 3.0  # with a reader that reads no more
_stuck: set[int] = set()  # descriptors whose reader has used it up
is_quiet = False  # with --quiet: `info` prints nothing


def info(sentence: str) -> None:
    """Print a sentence on stderr, unless the launcher is to be quiet."""
    if not is_quiet:
        error(sentence)


def error(sentence: str) -> None:
    """Print a sentence on stderr. The job continues if the terminal is gone.

    It may quote a rank, which must neither control the terminal nor begin a line with "mpiddp: ".
    """
    # sys.stderr would flush again at exit, fail, and end this process with code 120.
    with contextlib.suppress(OSError):
        write_all(2, line(sentence))


def write_all(target: int, text: bytes) -> None:
    """Write all of the text. A reader that reads nothing for some seconds gets none, then and later."""
    rest = memoryview(text)
    while rest and target not in _stuck:
        if not is_writable(target, _PATIENCE_S):
            _stuck.add(target)
            return
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(target, rest[: select.PIPE_BUF]) :]


def is_writable(target: int, timeout_s: float = 0.0) -> bool:
    """Whether a reader takes select.PIPE_BUF bytes without a wait, now or within `timeout_s`."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    return bool(poll.poll(1000 * timeout_s))


def line(sentence: str) -> bytes:
    """The line that `error` prints."""
    text = escaped(sentence, keep="\n").replace("\n", "\n  ")
    return f"mpiddp: {text}\n".encode(errors="backslashreplace")
