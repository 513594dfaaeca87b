"""What a rank prints of us: its log, `logging.getLogger("mpiddp")` with its handler."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from mpiddp.errors import print_line

log = logging.getLogger("mpiddp")


class _ConsoleHandler(logging.Handler):
    """Prints and flushes "mpiddp: …": INFO on stdout, higher levels on stderr.

    The lines of `mpiddp train` about its training are a program's output, and stay as they are.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno > logging.INFO else sys.stdout
        # A log never ends the run: not if the terminal is gone or the disk is full, nor if the script has
        # closed or replaced the stream.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            try:
                is_output = record.name != log.name and record.levelno == logging.INFO
                start = "" if is_output else "mpiddp: "
                print_line(f"{start}{self.format(record)}", stream)
            except BrokenPipeError:  # the reader is gone, and Python's own flush at exit would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def log_to_console(rank: int) -> None:
    """Print the INFO records of rank 0, and the warnings of every rank, as soon as the rank is known."""
    log.propagate = False
    log.setLevel(logging.INFO)
    others = [handler for handler in log.handlers if not isinstance(handler, _ConsoleHandler)]
    log.handlers = [*others, _ConsoleHandler(logging.INFO if rank == 0 else logging.WARNING)]
