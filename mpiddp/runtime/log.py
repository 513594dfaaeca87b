"""The log of a rank: `logging.getLogger("mpiddp")`, with one handler for what people read.

INFO goes to stdout and anything above to stderr, of rank 0 alone. A run that has a folder adds a file
handler for each rank.
"""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("mpiddp")


class ConsoleHandler(logging.Handler):
    """Prints the bare message, INFO on stdout and anything above on stderr, and flushes it."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno > logging.INFO else sys.stdout
        try:
            print(self.format(record), file=stream, flush=True)
        except BrokenPipeError:  # nobody reads any more, which is no reason to end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError:  # a terminal that is gone
            pass


def log_to_console(rank: int) -> None:
    """Print what this process logs, if it is rank 0. To be called once the rank is known."""
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [each for each in log.handlers if not isinstance(each, ConsoleHandler)]
    if rank == 0:
        log.addHandler(ConsoleHandler())
