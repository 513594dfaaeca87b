"""Which files of shards a folder has. A host without a shared file system rightly lacks some of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import BrokenCheckpoint
from mpiddp.checkpoints.shards import index as shard_index


@dataclass(frozen=True)
class Inventory:
    """The files of shards of a checkpoint, and those that its folder lacks."""

    num_files: int  # of all hosts; 0 if nothing is sharded
    missing: tuple[str, ...] = ()  # other hosts may keep them


def inventory(folder: Path) -> Inventory:
    """Compare shards.json with the manifest. `directory.verify` compares the manifest with the files.

    Raises:
        BrokenCheckpoint: a file of shards is of another save, or shards.json is not one of mpiddp.
    """
    try:
        manifest = directory.listed(folder)
        index = shard_index.read(folder)
        if index is None:
            return Inventory(0)
        lacking = index.lacking(manifest)
        for name in lacking:
            if name in manifest:
                raise BrokenCheckpoint(f"{name} is of another save")
    except BrokenCheckpoint as error:
        raise type(error)(f"checkpoint {folder.name}: {error}") from None
    except OSError as error:
        raise BrokenCheckpoint(
            f"checkpoint {folder.name}: {shard_index.INDEX} cannot be read: {error.strerror}"
        ) from None
    return Inventory(len(index.files), tuple(lacking))


def is_valid(folder: Path) -> bool:
    """Whether every file of the folder is valid and of one save. Some files of shards may be missing."""
    try:
        directory.verify(folder)
        inventory(folder)
    except BrokenCheckpoint:
        return False
    return True


def has_all(folder: Path) -> bool:
    """Whether the folder has every file of shards. Reads no file of tensors."""
    try:
        return not inventory(folder).missing
    except BrokenCheckpoint:
        return False


def is_complete(folder: Path) -> bool:
    """Whether the folder is valid and has every file of shards."""
    return has_all(folder) and directory.is_valid(folder)
