"""The part of a push or a pull that each host does itself, before rsync.

This module travels to the hosts as source. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpiddp.files import read_limited

SENT = ".mpiddp-sent"  # a file in a folder: the packed paths that pushes have sent to this host
_LONGEST_LIST = 15 << 20  # bytes, less than the most that a login may print
NO_RSYNC = "rsync is not installed {}.\n  fix: sudo apt-get install rsync"


def has(folder: str) -> str | bool:
    """Whether this host has the folder, or a sentence if it cannot take part in a pull."""
    return _why_not() or Path(folder).is_dir()


def beginning(path: Path, size: int = sys.maxsize) -> tuple[int, str]:
    """The bytes of a file, at most `size`, and their SHA-256."""
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while chunk := file.read(min(left, 1 << 20)):
            digest.update(chunk)
            left -= len(chunk)
    return size - left, digest.hexdigest()


def grown(folder: str, files: Sequence[tuple[str, int, str]]) -> list[str]:
    """The names of the files that begin here as they are where they were pulled."""
    facts = (
        (name, beginning(Path(folder, name), size) == (size, sha)) for name, size, sha in files
    )
    return [name for name, is_equal in facts if is_equal]


def prepare(folders: Sequence[str], left_out: Sequence[str] = ()) -> str | dict[str, list[str]]:
    """Make these folders. Returns why no push is taken, or the packed paths that pushes have `sent` to each, and
    which paths of `left_out` this host lacks (`lacks`)."""
    sent = [""] * len(folders)
    if why_not := _why_not():
        return why_not
    for number, folder in enumerate(map(Path, folders)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"{folder}: {error.strerror}."
        with suppress(OSError, ValueError):  # nothing has been sent yet
            sent[number] = read_limited(folder / SENT, _LONGEST_LIST, is_ours=True).decode("ascii")
    return {"sent": sent, "lacks": [path for path in left_out if not Path(path).exists()]}


def _why_not() -> str:
    return "" if shutil.which("rsync") else NO_RSYNC.format("there")
