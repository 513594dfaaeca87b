"""shards.json: which part of each sharded tensor lies in which file, and the SHA-256 of these files.

    {"tensors": {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "dtype": "float32",
                 "chunks": [{"offsets": [0, 0], "sizes": [5, 64], "rank": 0}, …]}},
     "files": {"shard_00000.pt": {"bytes": 5000, "sha256": "1f3a…"}, …}}

The name of a tensor is its path in the saved state, as JSON. Every host has the same shards.json, which
lists the files of all hosts: so a host without some of them knows what it lacks, and a file of another save
is found out. torch's own `.metadata` holds the same as a pickle, which could run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.manifest import BrokenCheckpoint, Entry
from mpiddp.checkpoints.manifest import parse as parse_manifest
from mpiddp.paths import read_limited

INDEX = "shards.json"
MAX_BYTES = 1 << 30
_MAX_RANKS = 10**5  # a file's name has five digits
# Of torch. A name of anything else could be any attribute of the module.
DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"),
    }
)


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


def read(folder: Path) -> ShardIndex | None:
    """The index of the checkpoint in `folder`; None if nothing in it is sharded.

    Raises:
        BrokenCheckpoint: it is not an index of mpiddp.
        OSError: it cannot be read.
    """
    try:
        return parse(read_limited(folder / INDEX, MAX_BYTES))
    except FileNotFoundError:
        return None


def parse(content: bytes) -> ShardIndex:
    """Check a shards.json, which may come from anywhere, before any part of it is used.

    Raises:
        BrokenCheckpoint: it is not an index of mpiddp.
    """
    try:
        found = json.loads(content)
        files = parse_manifest(json.dumps(found["files"]).encode())
        tensors = {str(name): _tensor(values) for name, values in found["tensors"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BrokenCheckpoint(f"{INDEX} is not a table of shards") from None
    for name, tensor in tensors.items():
        _check_name(name)
        for chunk in tensor.chunks:
            if file_of(chunk.rank) not in files:
                raise BrokenCheckpoint(f"{INDEX} does not list {file_of(chunk.rank)}")
    return ShardIndex(tensors, files)


def _tensor(values: dict[str, Any]) -> SavedTensor:
    shape, dtype = _numbers(values["shape"]), values["dtype"]
    chunks = tuple(
        Chunk(_numbers(each["offsets"]), _numbers(each["sizes"]), _number(each["rank"], _MAX_RANKS))
        for each in values["chunks"]
    )
    if dtype not in DTYPES:
        raise ValueError(f"no dtype of torch: {dtype!r}")
    for chunk in chunks:
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(shape) or any(e > n for e, n in zip(ends, shape, strict=True)):
            raise ValueError("a chunk outside of its tensor")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError("a tensor with a part that is in no file")
    return SavedTensor(shape, dtype, chunks)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError("expected a list")
    return tuple(_number(each, 1 << 53) for each in values)


def _number(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError("expected a whole number")
    return value


def path_of(name: str) -> tuple[Any, ...]:
    """The keys that lead to the tensor in the saved state."""
    return tuple(json.loads(name))


def name_of(path: tuple[Any, ...]) -> str:
    return json.dumps(path)


def _check_name(name: str) -> None:
    try:
        is_path = isinstance(json.loads(name), list) and not any(
            isinstance(key, (list, dict)) for key in json.loads(name)
        )
    except (ValueError, RecursionError):
        is_path = False
    if not is_path:
        raise BrokenCheckpoint(f"{INDEX} names a tensor that is at no path")
