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
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.folder import INDEX, MAX_INDEX_BYTES, Entry
from mpiddp.checkpoints.state import filled, mapped, name_of, path_of, read_tensors
from mpiddp.errors import UserError
from mpiddp.paths import read_error, read_limited

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

    def _target(self, name: str, tensor: Tensor | None) -> Tensor:
        saved = self.tensors[name]
        dtype: torch.dtype = getattr(torch, saved.dtype)
        if tensor is None:
            return torch.empty(saved.shape, dtype=dtype, device="cpu")
        if tuple(tensor.shape) != saved.shape:
            where = ".".join(map(str, path_of(name)))
            raise UserError(
                f"{where} was saved with shape {list(saved.shape)}; it now has {list(tensor.shape)}. "
                "Build the same model as before."
            )
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)

    def read(self, names: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The tensors of these names, each placed like the given one, from one file after the other.

        Only the bytes of these tensors are read. Not a collective.
        """
        from torch.distributed.checkpoint import DefaultLoadPlanner

        targets = {name: self._target(name, tensor) for name, tensor in names.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, _metadata(self.tensors), is_coordinator=True)
        owners = {
            (name, chunk.offsets): chunk.rank
            for name, saved in self.tensors.items()
            for chunk in saved.chunks
        }
        items = defaultdict(list)
        for item in planner.create_local_plan().items:
            where = item.storage_index
            items[file_of(owners[where.fqn, tuple(where.offset or ())])].append(item)
        for file, of_file in items.items():
            if file not in self.files:
                raise UserError(
                    f"{self.files[INDEX].parent} has no {file}, which its {INDEX} names."
                )
            contents = read_tensors(self.files[file], mmap=True)
            for item in of_file:
                part = contents[item.storage_index.fqn]
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).detach().copy_(part)
        return targets


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
