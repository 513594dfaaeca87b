"""What the pushes of a folder have sent to a host, as the host remembers it in `.mpiddp-sent` of the folder.

So a push removes a file that an earlier push has sent and that is gone since, and nothing else. This module
travels to the hosts as source. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import base64
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

SENT = ".mpiddp-sent"
NO_RSYNC = "rsync is not installed {}. Run{}: sudo apt-get install rsync"


def has(folder: str) -> str | bool:
    """Whether this host has the folder, or a sentence if it cannot take part in a pull."""
    return _why_not() or Path(folder).is_dir()


def packed(paths: Iterable[str]) -> str:
    """These paths as one argument of `prepare` and `remember`: a folder may have a million files."""
    return base64.b64encode(zlib.compress(os.fsencode("\0".join(paths)))).decode()


def prepare(folders: Mapping[str, str]) -> str | list[list[str]]:
    """On a host: make these folders, and find what an earlier push has sent that the packed paths lack.

    Returns these paths of each folder, or a sentence if this host cannot take the push.
    """
    if why_not := _why_not():
        return why_not
    gone = []
    for folder, paths in folders.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"{folder}: {error.strerror}."
        gone.append([os.fsdecode(path) for path in _sent(folder) - _unpacked(paths)])
    return gone


def remember(folders: Mapping[str, str]) -> str:
    """On a host: these folders have got what the packed paths name. Returns a sentence if that fails."""
    for folder, paths in folders.items():
        sent, top = _unpacked(paths), os.fsencode(folder)
        # A push that leaves an entry out does not forget that an earlier one has sent it.
        sent |= {path for path in _sent(folder) - sent if os.path.lexists(top + b"/" + path)}
        part = Path(folder, f"{SENT}.part")
        try:
            part.write_bytes(b"\0".join(sorted(sent)))
            part.replace(Path(folder, SENT))
        except OSError as error:
            return f"{part}: {error.strerror}."
    return ""


def _why_not() -> str:
    return "" if shutil.which("rsync") else NO_RSYNC.format("there", " there")


def _sent(folder: str) -> set[bytes]:
    try:
        return {*Path(folder, SENT).read_bytes().split(b"\0")} - {b""}
    except OSError:  # nothing has been sent yet
        return set()


def _unpacked(paths: str) -> set[bytes]:
    return {*zlib.decompress(base64.b64decode(paths)).split(b"\0")} - {b""}
