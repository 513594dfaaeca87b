"""The sharded tensors of a checkpoint: which rank saves which box of them, and how any ranks read them.

torch's planners decide both. shards.json says in which file each box lies:

    {"tensors": {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "dtype": "float32",
                 "chunks": [{"offsets": [0, 0], "sizes": [5, 64], "rank": 0}, …]}},
     "files": {"shard_00000.pt": {"bytes": 5000, "sha256": "1f3a…"}, …}}

The name of a tensor is its path in the saved state, as JSON. torch's own `.metadata` holds the same as a
pickle, which could run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.folder import INDEX, MAX_INDEX_BYTES, Entry
from mpiddp.checkpoints.state import Keys, filled, mapped, read_tensors
from mpiddp.errors import UserError
from mpiddp.paths import read_error, read_limited

# The tensor like which a saved one is placed, by its path in the state; None for a whole one on the CPU.
Like = Callable[[Keys], Tensor | None]


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


def file_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"shard_{rank:05d}.pt"


# Written


@dataclass(frozen=True)
class ShardPlan:
    """What one rank saves, and where all parts of all tensors are."""

    own: tuple[str, ...] = ()  # the names of the tensors of which this rank saves its part
    tensors: dict[str, SavedTensor] = field(default_factory=dict)  # all by name; only on writers
    signature: object = None  # of the tensors that were planned; None before


def plan_shards(
    sharded: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    previous: ShardPlan,
    *,
    writers: Collection[int] = (0,),
) -> ShardPlan:
    """Decide who saves these tensors. A collective, unless `previous` is for such tensors.

    Rank 0 computes the plan of all ranks. Parts that several ranks have, under HSDP for example, are saved
    once, by the rank that has least to save.

    Args:
        group: of all ranks; None if the job has one.
        writers: the ranks that write shards.json.
    """
    signature = [_signature(name, tensor) for name, tensor in sharded.items()]
    if previous.signature == signature:
        return previous
    from torch.distributed.checkpoint import DefaultSavePlanner  # takes a while

    rank = dist.get_rank() if group else 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(sharded), is_coordinator=rank == 0)
    plans: list[Any] = [planner.create_local_plan()]
    if group is not None:
        own = plans[0]
        plans = [None] * dist.get_world_size()
        dist.gather_object(own, plans if rank == 0 else None, group=group)
    answers: list[Any] = []
    if rank == 0:
        global_plans, metadata = planner.create_global_plan(plans)
        names = [
            [item.index.fqn for item in plan.items if _has_values(item)] for plan in global_plans
        ]
        owners = {
            (item.index.fqn, tuple(item.index.offset or ())): number
            for number, plan in enumerate(global_plans)
            for item in plan.items
        }
        tensors = {
            name: _saved_tensor(name, each, owners)
            for name, each in metadata.state_dict_metadata.items()
        }
        answers = [(own, tensors if n in writers else {}) for n, own in enumerate(names)]
    if group is not None:
        received: list[Any] = [None]
        dist.scatter_object_list(received, answers or None, 0, group=group)
        answers = received
    names_of_this, tensors_of_all = answers[0]
    return ShardPlan(tuple(names_of_this), tensors_of_all, signature)


def _signature(name: str, tensor: Any) -> tuple[Any, ...]:
    """What the plan depends on. It is the same on all ranks, which therefore plan together or not at all."""
    mesh = tensor.device_mesh
    return name, tensor.shape, tensor.dtype, tensor.placements, mesh.mesh.tolist()


def _has_values(item: Any) -> bool:
    """Some ranks have no part of a tensor that is shorter than the number of ranks."""
    return item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes


def _saved_tensor(
    name: str, saved: Any, owners: Mapping[tuple[str, tuple[int, ...]], int]
) -> SavedTensor:
    """The tensor as in shards.json."""
    chunks = tuple(
        Chunk(tuple(each.offsets), tuple(each.sizes), owners[name, tuple(each.offsets)])
        for each in saved.chunks
        if 0 not in each.sizes
    )
    dtype = str(saved.properties.dtype).removeprefix("torch.")
    return SavedTensor(tuple(saved.size), dtype, chunks)


def index_of(tensors: Mapping[str, SavedTensor], files: Mapping[str, Entry]) -> str:
    """The contents of shards.json."""
    return json.dumps({"tensors": tensors, "files": files}, default=vars)


# Read


@dataclass(frozen=True)
class ShardFiles:
    """The sharded tensors of a checkpoint, and where this host has its files, both by name."""

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, Path]
    _opened: dict[str, Any] = field(
        default_factory=dict
    )  # the contents of files, as they are mapped

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> ShardFiles:
        """Those of the shards.json among these files, whose hash has been verified.

        Raises:
            UserError, JobFailed: it was not written by mpiddp, or cannot be read.
        """
        path = files[INDEX]
        try:
            table = json.loads(read_limited(path, MAX_INDEX_BYTES))["tensors"]
            tensors = {
                name: SavedTensor(
                    tuple(values["shape"]),
                    values["dtype"],
                    tuple(
                        Chunk(tuple(each["offsets"]), tuple(each["sizes"]), each["rank"])
                        for each in values["chunks"]
                    ),
                )
                for name, values in table.items()
            }
        except OSError as error:
            raise read_error(str(path), error) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{path} is not a table of shards.") from None
        return cls(tensors, files)

    def as_values(self, state: Any) -> Any:
        """The state with a `ShardedValue` in the place of each sharded tensor."""
        return filled(state, {name: ShardedValue(name, self) for name in self.tensors})

    def read(self, name: str, like: Tensor | None = None) -> Tensor:
        """The tensor of this name, placed like the given one; None for the whole tensor on the CPU.

        Reads only its own bytes. Not a collective.
        """
        from torch.distributed.checkpoint import DefaultLoadPlanner

        saved = self.tensors[name]
        target = _target(name, saved, like)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: target}, _metadata(name, saved), is_coordinator=True)
        owners = {chunk.offsets: chunk.rank for chunk in saved.chunks}
        for item in planner.create_local_plan().items:
            part = self._contents(file_of(owners[tuple(item.storage_index.offset or ())]))[name]
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(part)
        return target

    def _contents(self, file: str) -> Any:
        if file not in self.files:
            raise UserError(f"{self.files[INDEX].parent} has no {file}, which its {INDEX} names.")
        if file not in self._opened:
            self._opened[file] = read_tensors(self.files[file], mmap=True)
        return self._opened[file]


def _target(name: str, saved: SavedTensor, like: Tensor | None) -> Tensor:
    dtype: torch.dtype = getattr(torch, saved.dtype)
    if like is None:
        return torch.empty(saved.shape, dtype=dtype, device="cpu")
    if tuple(like.shape) != saved.shape:
        where = ".".join(map(str, json.loads(name)))
        raise UserError(
            f"{where} was saved with shape {list(saved.shape)}; it now has {list(like.shape)}. "
            "Build the same model as before."
        )
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


def _metadata(name: str, saved: SavedTensor) -> Any:
    """The saved tensor as torch's planner takes it."""
    from torch.distributed.checkpoint import metadata as torchs

    chunks = [
        torchs.ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
        for each in saved.chunks
    ]
    properties = torchs.TensorProperties(dtype=getattr(torch, saved.dtype))
    found = torchs.TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
    return torchs.Metadata({name: found})


@dataclass(frozen=True)
class ShardedValue:
    """A sharded tensor that is still in its files, in `Resumed.state` in place of the tensor."""

    name: str
    files: ShardFiles

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.files.tensors[self.name].shape)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.files.tensors[self.name].dtype)
        return found

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective. Raises UserError if a file cannot be read."""
        return self.files.read(self.name)


def with_tensors(state: Any, like: Like) -> Any:
    """The state with a tensor in the place of each `ShardedValue`. Not a collective.

    Raises:
        UserError: a tensor has another shape than the saved one, or a file is of another program.
    """

    def read(path: Keys, value: Any) -> Any:
        return value.files.read(value.name, like(path)) if type(value) is ShardedValue else value

    return mapped(state, read)
