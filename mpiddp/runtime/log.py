"""What a rank prints of us: its log, `logging.getLogger("mpiddp")` with its handler.

`log_to_console` prints the INFO records of rank 0 on stdout, and the warnings of every rank on stderr. It
never ends the run, neither when the reader of stdout is gone nor when the disk is full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from mpiddp.errors import print_line

log = logging.getLogger("mpiddp")


class _ConsoleHandler(logging.Handler):
    """Prints and flushes the bare message: INFO on stdout, higher levels on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno > logging.INFO else sys.stdout
        try:
            # A path may be any bytes, which the stream cannot encode.
            encoding = getattr(stream, "encoding", None) or "utf-8"
            text = self.format(record).encode(encoding, "backslashreplace").decode(encoding)
            print_line(text, stream)
        except BrokenPipeError:  # the reader is gone
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError, AttributeError):
            pass  # the terminal is gone, the disk is full, or the script has closed or replaced the stream


def log_to_console(rank: int) -> None:
    """Print the log of this process. Call this as soon as the rank is known."""
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [each for each in log.handlers if not isinstance(each, _ConsoleHandler)]
    handler = _ConsoleHandler(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(handler)
