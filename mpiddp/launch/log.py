"""What the launcher says to its user: lines on stderr that begin with "mpiddp: "."""

from __future__ import annotations

import contextlib
import os


def info(sentence: str) -> None:
    """Print a sentence on stderr. A terminal that is gone does not take the job with it."""
    # Not by way of sys.stderr, which at exit would try once more, and end this process with code 120.
    with contextlib.suppress(OSError):
        os.write(2, f"mpiddp: {sentence}\n".encode(errors="backslashreplace"))
