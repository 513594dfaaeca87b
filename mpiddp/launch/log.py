"""The launcher's log: lines on stderr that begin with "mpiddp: "."""

from __future__ import annotations

import contextlib
import os


def info(sentence: str) -> None:
    """Print a sentence on stderr. The job continues if the terminal is gone."""
    # sys.stderr would flush again at exit, fail, and end this process with code 120.
    with contextlib.suppress(OSError):
        os.write(2, f"mpiddp: {sentence}\n".encode(errors="backslashreplace"))
