"""shards.json: which part of each sharded tensor lies in which file, and the SHA-256 of these files.

    {"tensors": {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "dtype": "float32",
                 "chunks": [{"offsets": [0, 0], "sizes": [5, 64], "rank": 0}, …]}},
     "files": {"shard_00000.pt": {"bytes": 5000, "sha256": "1f3a…"}, …}}

The name of a tensor is its path in the saved state, as JSON. Every host has the same shards.json, which
lists the files of all hosts: so a host without some of them, as it may be without a shared file system,
knows what it lacks, and a file of another save is found out. torch's own `.metadata` holds the same as a
pickle, which could run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import BrokenCheckpoint, Entry, parse_manifest
from mpiddp.paths import read_limited

INDEX = "shards.json"
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: a box, in the file of a rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class SavedTensor:
    """A sharded tensor. Its chunks cover it without overlap."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ShardIndex:
    """The contents of shards.json."""

    tensors: dict[str, SavedTensor]  # by name
    files: dict[str, Entry]  # by name, of all ranks

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def lacking(self, manifest: Mapping[str, Entry]) -> list[str]:
        """The files of shards that a folder with this manifest lacks, or has of another save."""
        return [name for name, entry in self.files.items() if manifest.get(name) != entry]


def file_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"shard_{rank:05d}.pt"


def name_of(path: tuple[Any, ...]) -> str:
    return json.dumps(path)


def path_of(name: str) -> tuple[Any, ...]:
    """The keys that lead to the tensor in the saved state."""
    return tuple(json.loads(name))


def read(path: Path) -> ShardIndex:
    """The index in this file. Its hash is verified before, so only its form is checked.

    Raises:
        BrokenCheckpoint: it is not an index of mpiddp.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(read_limited(path, MAX_BYTES))
        files = parse_manifest(json.dumps(found["files"]).encode())
        tensors = {name: _tensor(values) for name, values in found["tensors"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BrokenCheckpoint(f"{INDEX} is not a table of shards") from None
    return ShardIndex(tensors, files)


def _tensor(values: dict[str, Any]) -> SavedTensor:
    chunks = (
        Chunk(tuple(each["offsets"]), tuple(each["sizes"]), each["rank"])
        for each in values["chunks"]
    )
    return SavedTensor(tuple(values["shape"]), values["dtype"], tuple(chunks))


# Which files of shards a folder has


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
        if INDEX not in manifest:
            return Inventory(0)
        index = read(folder / INDEX)
        lacking = index.lacking(manifest)
        for name in lacking:
            if name in manifest:
                raise BrokenCheckpoint(f"{name} is of another save")
    except BrokenCheckpoint as error:
        raise type(error)(f"checkpoint {folder.name}: {error}") from None
    except OSError as error:
        raise BrokenCheckpoint(
            f"checkpoint {folder.name}: {INDEX} cannot be read: {error.strerror}"
        ) from None
    return Inventory(len(index.files), tuple(lacking))


def is_verified(folder: Path) -> bool:
    """Whether every file of the folder is verified and of one save. Some files of shards may be missing."""
    try:
        directory.verify(folder)
        inventory(folder)
    except BrokenCheckpoint:
        return False
    return True


def has_all_shards(folder: Path) -> bool:
    """Whether the folder has every file of shards. Reads no file of tensors."""
    try:
        return not inventory(folder).missing
    except BrokenCheckpoint:
        return False
