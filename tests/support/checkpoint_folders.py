"""Folders of checkpoints for tests: written as a save writes them, and searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mpiddp.checkpoints import folder


def write(root: Path, step: int, write_files: Callable[[Path], Mapping[str, str] | None]) -> Path:
    """Write the checkpoint of `step` into `root`; `write_files` may return the SHA-256 of files."""
    root.mkdir(parents=True, exist_ok=True)
    final = root / folder.name_of_step(step)
    with folder.writing(final) as (new, hashes):
        hashes.update(write_files(new) or {})
    return final
