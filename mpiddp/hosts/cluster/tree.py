"""The files of a folder as rows, which two hosts compare. `mpiddp hosts push` sends this source to the hosts.

A file is taken for unchanged where its size, its mode and its time of modification are, in nanoseconds: a
push sets them. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from typing import Any, List

PRIVATE = ".mpiddp-push"  # in each copy: its origin, what arrives, what is replaced
COMPILED = "__pycache__"  # each host writes its own
HISTORY = ".history.jsonl"  # the end of a name: what launches on this host have seen, mpiddp.hosts.history

# Path below the folder, kind, mode, size, time of modification in ns, target of a link. A list, as in JSON.
Row = List[Any]  # evaluated at import, also by Python 3.8
PATH, KIND, MODE, SIZE, TIME, TARGET = range(6)
FOLDER, FILE, LINK = "d", "f", "l"


def list_tree(folder: str, names: Iterable[str]) -> list[Row]:
    """The rows of these entries of `folder` and of all below them, parents first. Missing ones have none.

    Raises:
        OSError: a folder cannot be read.
    """
    rows: list[Row] = []
    for name in sorted(names):
        try:
            status = os.lstat(os.path.join(folder, name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        _add(rows, folder, name, status)
    return rows


def list_all(folder: str) -> list[Row]:
    """The rows of all that is in `folder`: none if it is missing. Raises OSError as `list_tree`."""
    return list_tree(folder, os.listdir(folder)) if os.path.isdir(folder) else []


def _add(rows: list[Row], folder: str, path: str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode) and not path.endswith(HISTORY):
        rows.append([path, FILE, mode, status.st_size, status.st_mtime_ns, ""])
    elif stat.S_ISLNK(status.st_mode):
        rows.append([path, LINK, 0, 0, 0, os.readlink(os.path.join(folder, path))])
    elif stat.S_ISDIR(status.st_mode):
        rows.append([path, FOLDER, mode, 0, 0, ""])
        for name, below in _entries(os.path.join(folder, path)):
            if name != COMPILED:
                _add(rows, folder, f"{path}/{name}", below)


def _entries(folder: str) -> list[tuple[str, os.stat_result]]:
    """What is in a folder, by name. From the open folder, the kernel finds a file in 0.8 of the time."""
    found = []
    opened = os.open(folder, os.O_RDONLY)
    try:
        for name in sorted(os.listdir(opened)):
            try:
                found.append((name, os.stat(name, dir_fd=opened, follow_symlinks=False)))
            except FileNotFoundError:  # a job that runs has removed it since
                continue
    finally:
        os.close(opened)
    return found


def digest(rows: list[Row]) -> str:
    lines = [
        f"{path}\0{kind}\0{mode}\0{size}\0{time}\0{to}" for path, kind, mode, size, time, to in rows
    ]
    return hashlib.sha256("\0".join(lines).encode(errors="surrogateescape")).hexdigest()


def by_name(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows below each entry of the folder."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[PATH].partition("/")[0], []).append(row)
    return found


def remove(path: str) -> None:
    """Remove a file or a folder with all in it, also where folders may not be written."""
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil  # only where it is needed, as in `connection.Peer`

        for folder, _, _ in os.walk(path):
            os.chmod(folder, 0o700)
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
