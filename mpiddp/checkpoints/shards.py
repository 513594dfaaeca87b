"""The sharded tensors of a checkpoint, read at any number of ranks: torch's planner chooses the boxes.

shards.json says in which file each box lies:

    {"tensors": {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "dtype": "float32",
                 "chunks": [{"offsets": [0, 0], "sizes": [5, 64], "rank": 0}, …]}},
     "files": {"shard_00000.pt": {"bytes": 5000, "sha256": "1f3a…"}, …}}

The name of a tensor is its path in the saved state, as JSON. torch's own `.metadata` holds the same as a
pickle, which could run code.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.directory import INDEX, MAX_INDEX_BYTES, BrokenCheckpoint, Entry, file_of
from mpiddp.checkpoints.state import filled, mapped, name_of, path_of, read_tensors
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import read_limited

# The tensor like which a saved one is placed, by its path in the state; None for a whole one on the CPU.
Like = Callable[[tuple[Any, ...]], Tensor | None]


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


def index_of(tensors: Mapping[str, SavedTensor], files: Mapping[str, Entry]) -> str:
    """The contents of shards.json."""
    return json.dumps({"tensors": tensors, "files": files}, default=vars)


def read_index(path: Path) -> dict[str, SavedTensor]:
    """The sharded tensors in this shards.json, by name. Its hash has been verified.

    Raises:
        BrokenCheckpoint: it was not written by mpiddp.
        OSError: it cannot be read.
    """
    try:
        tensors = json.loads(read_limited(path, MAX_INDEX_BYTES))["tensors"]
        return {name: _tensor(values) for name, values in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BrokenCheckpoint(f"{INDEX} is not a table of shards") from None


def _tensor(values: dict[str, Any]) -> SavedTensor:
    """Raises ValueError if the chunks do not fit the tensor: what they leave out would be undefined."""
    chunks = tuple(
        Chunk(tuple(each["offsets"]), tuple(each["sizes"]), each["rank"])
        for each in values["chunks"]
    )
    tensor = SavedTensor(tuple(values["shape"]), values["dtype"], chunks)
    numbers = [tensor.shape, *((*each.offsets, *each.sizes, each.rank) for each in chunks)]
    fits = all(
        type(number) is int and 0 <= number <= sys.maxsize for each in numbers for number in each
    )
    fits = fits and isinstance(getattr(torch, tensor.dtype), torch.dtype)
    if not fits or not all(_is_within(each, tensor.shape) for each in chunks):
        raise ValueError
    if sum(prod(each.sizes) for each in chunks) != prod(tensor.shape):
        raise ValueError
    return tensor


def _is_within(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset + size <= length for offset, size, length in ends)


@dataclass(frozen=True)
class ShardFiles:
    """The sharded tensors of a checkpoint, and where this host has its files, both by name."""

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, Path]

    def as_values(self, state: Any) -> Any:
        """The state with a `ShardedValue` in the place of each sharded tensor."""
        return filled(state, {name: ShardedValue(name, self) for name in self.tensors})

    def _target(self, name: str, tensor: Tensor | None) -> Tensor:
        saved = self.tensors[name]
        dtype: torch.dtype = getattr(torch, saved.dtype)
        where = ".".join(map(str, path_of(name)))
        if tensor is None:
            try:
                return torch.empty(saved.shape, dtype=dtype, device="cpu")
            except RuntimeError:  # of torch's allocator
                size = prod(saved.shape) * dtype.itemsize
                raise JobFailed(f"no memory for {where}, which has {size} bytes.") from None
        if tuple(tensor.shape) != saved.shape:
            raise UserError(
                f"{where} was saved with shape {list(saved.shape)}; it now has {list(tensor.shape)}. "
                "Build the same model as before."
            )
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)

    def read(self, names: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The tensors of these names, each placed like the given one, from one file after the other.

        Not a collective.
        """
        from torch.distributed.checkpoint import DefaultLoadPlanner

        targets = {name: self._target(name, tensor) for name, tensor in names.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, _metadata(self.tensors), is_coordinator=True)
        chunks = {
            (name, chunk.offsets): chunk
            for name, saved in self.tensors.items()
            for chunk in saved.chunks
        }
        items = defaultdict(list)
        for item in planner.create_local_plan().items:
            where = item.storage_index
            chunk = chunks[where.fqn, tuple(where.offset or ())]
            items[file_of(chunk.rank)].append((item, chunk))
        for file, of_file in items.items():
            contents = self._load(file)
            for item, chunk in of_file:
                part = contents.get(item.storage_index.fqn)
                if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes:
                    raise UserError(f"{self.files[file]} is not the file of this save.")
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).detach().copy_(part)
        return targets

    def _load(self, file: str) -> dict[str, Any]:
        if file not in self.files:
            raise UserError(f"{self.files[INDEX].parent} has no {file}, which its {INDEX} names.")
        contents = read_tensors(self.files[file])
        if not isinstance(contents, dict):
            raise UserError(f"{self.files[file]} was not written by mpiddp: it has other contents.")
        return contents


@dataclass(frozen=True)
class ShardedValue:
    """A sharded tensor that is still in its files, in `Resumed.state` in place of the tensor."""

    name: str
    files: ShardFiles

    @property
    def _saved(self) -> SavedTensor:
        return self.files.tensors[self.name]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._saved.shape)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._saved.dtype)
        return found

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective. Raises UserError if a file cannot be read."""
        return self.files.read({self.name: None})[self.name]


def with_tensors(state: Any, like: Like) -> Any:
    """The state with a tensor in the place of each `ShardedValue`. Not a collective.

    Raises:
        UserError: a tensor has another shape than the saved one, or a file is of another program.
    """
    names: dict[str, Tensor | None] = {}
    value_names: dict[str, str] = {}  # the name of each value, by the name of its path in `state`
    files: list[ShardFiles] = []

    def find(path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, ShardedValue):
            names[value.name] = like(path)
            value_names[name_of(path)] = value.name
            files.append(value.files)
        return value

    mapped(state, find)
    if not files:
        return state
    found = files[0].read(names)
    return filled(state, {path: found[name] for path, name in value_names.items()})


def _metadata(tensors: Mapping[str, SavedTensor]) -> Any:
    """The index as torch's planner takes it."""
    from torch.distributed.checkpoint import metadata as torchs

    return torchs.Metadata(
        {
            name: torchs.TensorStorageMetadata(
                torchs.TensorProperties(dtype=getattr(torch, saved.dtype)),
                torch.Size(saved.shape),
                [
                    torchs.ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                    for each in saved.chunks
                ],
            )
            for name, saved in tensors.items()
        }
    )
