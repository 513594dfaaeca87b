"""The small files of a run: metrics.jsonl with one record per line, and JSON files written atomically.

The training matters more than these files: a record that cannot be written only causes a warning.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from mpiddp.runtime.log import log


class Records:
    """Appends records to metrics.jsonl, each at once. Without a path it writes nothing.

    A run that resumes at `step` drops the records of later steps, because it repeats these steps.
    """

    def __init__(self, path: Path | None, step: int = 0) -> None:
        self._path = path
        self._is_warned = False
        if path is None:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:
                _replace(path, b"".join(kept))
        except OSError as error:
            self._warn(error)

    @property
    def is_kept(self) -> bool:
        """Whether this process writes records."""
        return self._path is not None

    def write(self, **values: Any) -> None:
        if self._path is None:
            return
        try:
            _append(self._path, json.dumps(values).encode() + b"\n")
            self._is_warned = False
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            log.warning(f"warning: {self._path}: {error.strerror}.")
        self._is_warned = True


def save_json(path: Path, values: dict[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. Raises OSError."""
    _replace(path, json.dumps(values, indent=1).encode() + b"\n")


def _append(path: Path, line: bytes) -> None:
    """Append the whole line or nothing."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _step_of(line: bytes) -> float:
    """The step of a record; infinity for an invalid line, such as an incomplete one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return float("inf")
