"""The log of a rank: `logging.getLogger("mpiddp")`, and the handlers that write what it is told.

`log_to_console` prints INFO on stdout, of rank 0 alone, and warnings on stderr, of every rank.
`log_to_file` keeps a logger's records in a file. No handler ever ends the run: neither a reader that is
gone nor a full disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("mpiddp")


class ConsoleHandler(logging.Handler):
    """Prints the bare message, INFO on stdout and anything above on stderr, and flushes it."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno > logging.INFO else sys.stdout
        try:
            print(self.format(record), file=stream, flush=True)
        except BrokenPipeError:  # nobody reads any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError:  # a terminal that is gone, a full disk
            pass


class FileHandler(logging.FileHandler):
    """Appends each record with its time. What cannot be written is left out without a word."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # the base class's name
        """A full disk: failing checkpoints report it."""


def log_to_console(rank: int) -> None:
    """Print what this process logs. To be called once the rank is known."""
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [each for each in log.handlers if not isinstance(each, ConsoleHandler)]
    handler = ConsoleHandler(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(handler)


@contextlib.contextmanager
def log_to_file(logger: logging.Logger, path: Path) -> Iterator[None]:
    """Append what `logger` is told to the file while the body runs. Raises OSError if it cannot be opened."""
    handler = FileHandler(path)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk
            handler.close()
