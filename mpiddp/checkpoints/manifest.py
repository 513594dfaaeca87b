"""A checkpoint's manifest: the size and the SHA-256 of each of its files, as JSON.

    {"model.pt": {"bytes": 5000, "sha256": "1f3a…"}}

A manifest may come from anywhere, so no file is touched before all of it has been checked.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from mpiddp.text import shown

MANIFEST = "manifest.json"
MAX_BYTES = 16 << 20
_LONGEST_NAME = 255  # bytes


class BrokenCheckpoint(Exception):
    """The folder is not a valid checkpoint. The message names the damage."""


class UnreadableCheckpoint(BrokenCheckpoint):
    """A machine failed: a disk, or a file server. The folder may be a valid checkpoint."""


@dataclass(frozen=True)
class Entry:
    """One file: its size, and its SHA-256 in hex digits."""

    bytes: int
    sha256: str


def parse(content: bytes) -> dict[str, Entry]:
    """The files of a checkpoint, by name.

    Raises:
        BrokenCheckpoint: it is not a manifest, or names a file outside of its folder.
    """
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise BrokenCheckpoint(f"{MANIFEST} is not JSON that can be read") from None
    if not isinstance(manifest, dict):
        raise BrokenCheckpoint(f"{MANIFEST} is not a table of files")
    return {_checked_name(name): _entry(name, values) for name, values in manifest.items()}


def _checked_name(name: str) -> str:
    """A name that cannot lead out of the checkpoint's folder."""
    try:
        is_name = name not in ("", ".", "..") and not {"/", "\0"} & set(name)
        is_name = is_name and len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:  # half a character
        is_name = False
    if not is_name:
        raise BrokenCheckpoint(f'{MANIFEST} lists "{shown(name)}", which is not the name of a file')
    return name


def _entry(name: str, values: object) -> Entry:
    if isinstance(values, dict):
        size, sha256 = values.get("bytes"), values.get("sha256")
        is_sha256 = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)
        if type(size) is int and 0 <= size < 1 << 63 and is_sha256:
            return Entry(size, str(sha256))
    raise BrokenCheckpoint(f"{MANIFEST} has no size and SHA-256 of {shown(name)}")
