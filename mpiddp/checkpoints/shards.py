"""The sharded tensors of a checkpoint: each rank saves its boxes of them, and any ranks read them.

    shard_00001.pt   {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "offsets": [5, 0], "box": …}, …}
    shards.json      {"files": {"shard_00001.pt": {"bytes": 5000, "sha256": "1f3a…"}, …}}

The name of a tensor is its path in the saved state, as JSON; its box here is [5, 64]. The placements of a
DTensor say which box of it a rank has, so the ranks need no plan that they would have to agree on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.state import is_sharded, mapped, read_tensors
from mpiddp.errors import UserError

Boxes = dict[str, dict[str, Any]]


def file_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"shard_{rank:05d}.pt"


# Written


def boxes_of(sharded: Mapping[str, Any]) -> Boxes:
    """What this rank saves of these DTensors, which are the same on all ranks. Not a collective.

    Of a box that several ranks have, under HSDP for example, one copy is saved. The copies take turns from
    tensor to tensor, so their ranks save about as much as each other.
    """
    boxes: Boxes = {}
    for number, (name, tensor) in enumerate(sharded.items()):
        place = tensor.device_mesh.get_coordinate()
        if place is None:  # this rank has no part of the tensor
            continue
        copy, num_copies = 0, 1
        for index, size, placement in zip(
            place, tensor.device_mesh.shape, tensor.placements, strict=True
        ):
            if placement.is_replicate():
                copy, num_copies = copy * size + index, num_copies * size
        box, offsets = _own_box(tensor)
        # Some ranks have no part of a tensor that is shorter than their number.
        if copy == number % num_copies and (box.numel() or not any(offsets)):
            boxes[name] = {
                "shape": list(tensor.shape),
                "offsets": list(offsets),
                "box": box.contiguous(),
            }
    return boxes


def _own_box(tensor: Any) -> tuple[Tensor, Sequence[int]]:
    """This rank's part of a tensor, and its offsets in the whole tensor."""
    if not is_sharded(tensor):
        return tensor.detach(), [0] * tensor.ndim
    [chunk] = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks as well
    return tensor.to_local().detach(), chunk.offsets


# Read


@dataclass(frozen=True)
class ShardedValue:
    """A sharded tensor that is still in its files, in `Resumed.state` in place of the tensor.

    The boxes are those of all ranks, in mapped files: each is read when it is used.
    """

    name: str
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
        """The tensor, placed like the given one. Reads only this rank's bytes. Not a collective."""
        if like.shape != self.shape:
            where = ".".join(map(str, json.loads(self.name)))
            raise UserError(
                f"{where} was saved with shape {list(self.shape)}; it now has {list(like.shape)}."
            )
        return self._filled(torch.empty_like(like, dtype=self.dtype, requires_grad=False))

    def _filled(self, target: Tensor) -> Tensor:
        """The target, after this rank's part of it is read."""
        own, offsets = _own_box(target)
        for each in self.boxes:
            _copy_overlap(each["box"], each["offsets"], own, offsets)
        return target


def with_sharded(state: Any, files: Iterable[Path]) -> Any:
    """The state with a `ShardedValue` in the place of each tensor of these files of shards."""
    boxes: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        for name, box in read_tensors(path, mmap=True).items():
            boxes.setdefault(name, []).append(box)
    values = {name: ShardedValue(name, each) for name, each in boxes.items()}
    return mapped(state, lambda path, value: values.get(json.dumps(path), value))


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
