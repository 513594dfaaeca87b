"""Everything is boxes: each rank saves its boxes of what all ranks have together, and any ranks read them.

    model.pt         what every writer has whole; None in the places of the rest
    shard_00001.pt   {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "offsets": [5, 0], "box": …}, …}
    shards.json      {"files": {"shard_00001.pt": {"bytes": 5000, "sha256": "1f3a…"}, …}}

The name of a tensor is its path in the saved state, as JSON; its box here is [5, 64]. A tensor that only some
ranks have, such as one of a pipeline's stage, is a single box of the lowest of them. The placements of a
DTensor say which box of it a rank has, so the ranks need no plan that they would have to agree on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.state import (
    DICTS,
    LISTS,
    Keys,
    Outline,
    is_sharded,
    mapped,
    read_tensors,
    shown_path,
)
from mpiddp.errors import UserError

_SAMPLES = 8  # elements of a tensor by which ranks compare it
_MAX_SAMPLED = 1000  # tensors
_TOLERANCE = 0.01  # of the largest one: ranks on different processors differ in the last bits
# Each rank has its own in DDP, and those of the lowest rank are saved.
_OF_EACH_RANK = ("running_mean", "running_var", "num_batches_tracked")
_HINT = "Save what differs under keys of its own, as in {f'optimizer{stage}': …}, or in per_rank."


def file_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"shard_{rank:05d}.pt"


# The union of what all ranks have


class _Leaf(NamedTuple):
    """A tensor of some ranks, without its values."""

    label: str  # its type, shape and placements
    mesh: tuple[int, ...]  # the ranks that share a DTensor; () for a plain one
    part: str  # which box of it the sample is of
    sample: tuple[float, ...]

    @classmethod
    def of(cls, path: Keys, value: Any, *, samples: bool) -> _Leaf:
        label, box, part = f"{value.dtype} {list(value.shape)}", value, ""
        mesh: tuple[int, ...] = ()
        if is_sharded(value):
            label, mesh = f"{label} as {value.placements}", _mesh_of(value)
            box, offsets = _own_box(value) if value.device_mesh.get_coordinate() else (None, ())
            part = f"{offsets}"
        sampled = samples and path[-1] not in _OF_EACH_RANK and box is not None
        return cls(label, mesh, part, _sample(box) if sampled else ())


def _mesh_of(value: Any) -> tuple[int, ...]:
    return tuple(value.device_mesh.mesh.flatten().tolist())


def _sample(value: Tensor) -> tuple[float, ...]:
    """A few elements of a tensor, as numbers. Waits for a GPU."""
    flat = value.detach()
    if not flat.numel():
        return ()
    flat = flat.int_repr() if flat.is_quantized else flat
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = (flat if flat.is_contiguous() else flat[(0,) * (flat.ndim - 1)]).reshape(-1)
    flat = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
    flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # fp8, fp4
    return tuple(flat.double().tolist())


def _are_close(a: Sequence[float], b: Sequence[float]) -> bool:
    largest = max((abs(each) for each in (*a, *b) if abs(each) < float("inf")), default=0.0)
    near = _TOLERANCE * largest
    return all(
        x == y or abs(x - y) <= near or (x != x and y != y) for x, y in zip(a, b, strict=True)
    )


def digest_of(outline: Outline, *, samples: bool) -> str:
    """A hash that is the same on ranks that save the same, with `samples` the same values as well."""
    rows: list[Any] = []
    every = max(1, len(outline.tensors) // _MAX_SAMPLED)
    for index, (path, value) in enumerate(zip(outline.paths, outline.tensors, strict=True)):
        if is_sharded(value):  # its ranks have different parts of it
            rows.append(_Leaf.of(path, value, samples=False)[:2])
        else:
            sampled = samples and index % every == 0 and path[-1] not in _OF_EACH_RANK
            rows.append((tuple(value.shape), value.dtype, _sample(value) if sampled else ()))
    return hashlib.sha256(repr((outline.tree, rows)).encode()).hexdigest()


@dataclass
class Union:
    """What all ranks together save.

    Attributes:
        tree: the state with `...` in place of tensors; None if all ranks have the same.
        savers: the ranks that save it, by path: those of a DTensor's mesh, or the lowest that has a plain
            tensor; {} if all ranks have the same.
        boxed: the tensors that not every writer has whole.
    """

    tree: Any = None
    savers: dict[Keys, tuple[int, ...]] = field(default_factory=dict)
    boxed: set[Keys] = field(default_factory=set)
    is_partial: bool = False  # some ranks have tensors that others do not

    def is_boxed(self, path: Keys, value: Any) -> bool:
        return is_sharded(value) or path in self.boxed

    def saves(self, path: Keys, value: Any, rank: int) -> bool:
        """Whether this rank takes part in saving a boxed tensor."""
        return self.savers.get(path) in (None, _mesh_of(value) if is_sharded(value) else (rank,))


def union_of(run: Run, outline: Outline, digests: Sequence[str]) -> Union:
    """The union of what the ranks save. A collective if the digests of the ranks differ.

    Raises ValueError, the same on all ranks, where ranks have different things under one key.
    """
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    if len(first) == 1:
        return Union()
    pairs = zip(outline.paths, outline.tensors, strict=True)
    own = outline.filled(_Leaf.of(path, value, samples=True) for path, value in pairs)
    trees: dict[int, Any] = {}
    for rank in sorted(first.values()):  # one of each kind, not those of a thousand ranks
        sent = [own]
        dist.broadcast_object_list(sent, rank, group=run.group)
        trees[rank] = sent[0]
    writers = {first[digests[rank]] for rank in run.writers}
    merge = _Merge(run, writers, len(trees))
    merge.found.tree = merge.merged(trees, ())
    return merge.found


class _Merge:
    """The trees of several ranks become one."""

    def __init__(self, run: Run, writers: set[int], num_trees: int) -> None:
        self._run, self._writers, self._num_trees = run, writers, num_trees
        self.found = Union()

    def merged(self, found: Mapping[int, Any], path: Keys) -> Any:
        """The union of these, by rank. Raises ValueError."""
        # A rank that has nothing, such as the state of an optimizer on rank 0 alone, gives None.
        found = {rank: each for rank, each in found.items() if each is not None}
        if not found:
            return None
        first = min(found)
        value = found[first]
        for rank, other in found.items():
            if _label(other) != _label(value):
                self._refuse(path, {first: _label(value), rank: _label(other)})
        kind = type(value)
        if kind is _Leaf:
            return self._leaf(found, path)
        if kind in LISTS:
            rows = range(len(value))
            return kind(self._at(row, found, path) for row in rows)
        if kind not in DICTS:
            return value
        keys = dict.fromkeys(key for each in found.values() for key in each)
        parts = kind({key: self._at(key, found, path) for key in keys})
        for rank in sorted(found, reverse=True):  # a module's state_dict keeps its versions there
            getattr(parts, "__dict__", {}).update(getattr(found[rank], "__dict__", {}))
        return parts

    def _at(self, key: Any, found: Mapping[int, Any], path: Keys) -> Any:
        having = [rank for rank, each in found.items() if type(each) in LISTS or key in each]
        return self.merged({rank: found[rank][key] for rank in having}, (*path, key))

    def _leaf(self, found: Mapping[int, _Leaf], path: Keys) -> Any:
        first = min(found)
        leaf = found[first]
        for rank, other in found.items():
            has_same_part = leaf.part == other.part and (leaf.mesh != other.mesh or not leaf.mesh)
            if has_same_part and not _are_close(leaf.sample, other.sample):
                said = {first: f"values {leaf.sample[:2]}…", rank: f"{other.sample[:2]}…"}
                self._refuse(path, said)
        self.found.savers[path] = leaf.mesh or (first,)
        self.found.is_partial |= len(found) < self._num_trees
        if leaf.mesh or not self._writers <= found.keys():
            self.found.boxed.add(path)
        return ...

    def _refuse(self, path: Keys, said: Mapping[int, str]) -> None:
        name = self._run.coordinator.name
        both = ", and ".join(f"{what[:80]} on {name(rank)}" for rank, what in said.items())
        raise ValueError(f"{shown_path(path)} differs: {both}. {_HINT}")


def _label(value: Any) -> str:
    """What has to be the same on all ranks."""
    kind = type(value)
    if kind in DICTS:
        return f"a {kind.__name__}"
    if kind in LISTS:
        return f"a {kind.__name__} of {len(value)}"
    return value.label if kind is _Leaf else repr(value)


# Written


def box_of(path: Keys, tensor: Tensor) -> dict[str, Any] | None:
    """What this rank saves of a tensor, or None. Not a collective.

    Of a box that several ranks have, under HSDP for example, one copy is saved. Its path decides which, so
    their ranks save about as much as each other.
    """
    copy, num_copies = 0, 1
    if is_sharded(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        place = mesh.get_coordinate()
        if place is None:  # this rank has no part of the tensor
            return None
        placements = tensor.placements  # type: ignore[attr-defined]
        for index, size, placement in zip(place, mesh.shape, placements, strict=True):
            if placement.is_replicate():
                copy, num_copies = copy * size + index, num_copies * size
    box, offsets = _own_box(tensor)
    # Some ranks have no part of a tensor that is shorter than their number.
    is_empty = not box.numel() and any(offsets)
    if is_empty or copy != crc32(json.dumps(path).encode()) % num_copies:
        return None
    place = {"shape": list(tensor.shape), "offsets": list(offsets)}
    if is_sharded(tensor):
        return {**place, "box": box.contiguous()}
    return {**place, "box": box, "is_plain": True}


def _own_box(tensor: Any) -> tuple[Tensor, Sequence[int]]:
    """This rank's part of a tensor, and its offsets in the whole tensor."""
    if not is_sharded(tensor):
        return tensor.detach(), [0] * tensor.ndim
    [chunk] = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks as well
    return tensor.to_local().detach(), chunk.offsets


# Read


@dataclass(frozen=True)
class ShardedValue:
    """A tensor that is still in its files, in `Resumed.state` in place of the tensor.

    The boxes are those of all ranks, in mapped files: each is read when it is used.
    """

    boxes: Sequence[Mapping[str, Any]]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.boxes[0]["shape"])

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.boxes[0]["box"].dtype
        return found

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective."""
        return self._filled(torch.empty(self.shape, dtype=self.dtype, device="cpu"))

    def read_like(self, like: Tensor) -> Tensor:
        """The tensor, placed like one of its shape. Reads only this rank's bytes. Not a collective."""
        return self._filled(torch.empty_like(like, dtype=self.dtype, requires_grad=False))

    def _filled(self, target: Tensor) -> Tensor:
        """The target, after this rank's part of it is read."""
        own, offsets = _own_box(target)
        for each in self.boxes:
            _copy_overlap(each["box"], each["offsets"], own, offsets)
        return target


def with_sharded(state: Any, files: Sequence[Path]) -> Any:
    """The state with the tensors of these files of shards: a whole one as it is, others as `ShardedValue`."""
    boxes: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        for name, box in read_tensors(path).items():
            boxes.setdefault(name, []).append(box)

    def value_of(path: Keys, value: Any) -> Any:
        found = boxes.get(json.dumps(path), []) if value is None else []
        if not found:
            return value
        first = found[0]
        # Replicas may repeat boxes.
        parts = {tuple(each["offsets"]): each["box"].numel() for each in found}
        has = sum(parts.values())
        if has != math.prod(first["shape"]):
            raise UserError(f"{shown_path(path)} has {has} elements of the shape {first['shape']}.")
        return first["box"] if first.get("is_plain") else ShardedValue(found)

    return mapped(state, value_of)


def _copy_overlap(source: Tensor, at: Sequence[int], target: Tensor, to: Sequence[int]) -> None:
    """Copy the elements that both boxes have. Their offsets in the whole tensor are `at` and `to`."""
    for dim, (first, second) in enumerate(zip(at, to, strict=True)):
        start = max(first, second)
        end = min(first + source.shape[dim], second + target.shape[dim])
        if start >= end:
            return
        source = source.narrow(dim, start - first, end - start)
        target = target.narrow(dim, start - second, end - start)
    target.copy_(source)
