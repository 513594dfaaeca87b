"""The state of a checkpoint, read from its files: whole tensors, and boxes of sharded ones, that ranks map.

Earlier versions wrote files of torch.save, and shards with the paths of their tensors:

    model.pt         the entry "model"; None in the places of tensors in shards
    ranks.pt         what each rank has saved for itself
    shard_00001.pt   {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "offsets": [5, 0], "box": …}, …}
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.files import read_saved, read_tensors
from mpiddp.checkpoints.folder import SHARDS, SUFFIX, stem_of
from mpiddp.checkpoints.state import Keys, key_of, mapped, own_part, shown_path
from mpiddp.errors import UserError


@dataclass(frozen=True)
class ShardedValue:
    """A tensor that is still in its files, in `Resumed.state` in place of the tensor.

    The boxes are those of all ranks, with their offsets, in mapped files: each is read when it is used.
    """

    shape: torch.Size
    boxes: Sequence[tuple[Tensor, Sequence[int]]]

    @property
    def dtype(self) -> torch.dtype:
        return self.boxes[0][0].dtype

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective."""
        return self._filled(torch.empty(self.shape, dtype=self.dtype, device="cpu"))

    def read_like(self, like: Tensor) -> Tensor:
        """The tensor, placed like one of its shape. Reads only this rank's bytes. Not a collective."""
        return self._filled(torch.empty_like(like, dtype=self.dtype, requires_grad=False))

    def _filled(self, target: Tensor) -> Tensor:
        """The target, after this rank's part of it is read."""
        own, offsets = own_part(target)
        for box, at in self.boxes:
            _copy_overlap(box, at, own, offsets)
        return target


def read_boxes(tree: Any, files: Iterable[Path]) -> Any:
    """The tree with the tensors of these files: a whole one as it is, others as `ShardedValue`.

    Raises UserError if a box is missing; what `read_tensors` raises.
    """
    found: dict[str, list[tuple[Tensor, Any]]] = defaultdict(list)
    layouts: dict[str, str] = {}
    for path in files:
        tensors, beside = read_tensors(path)
        tensors |= {name: tensors[first] for name, first in beside["tied"].items()}
        stem = "" if path.name.startswith(SHARDS) else f"{path.name.removesuffix(SUFFIX)}/"
        layouts |= {stem + name: layout for name, layout in beside["layouts"].items()}
        for name, tensor in tensors.items():
            found[stem + name].append((tensor, beside["boxes"].get(name)))

    def value_of(path: Keys, leaf: Any) -> Any:
        if type(leaf) is not torch.dtype:
            return leaf
        parts = found.get(key_of(path))
        if not parts:
            raise UserError(f"{shown_path(path)} is in none of its files.")
        value = joined(path, parts, leaf)
        if layout := layouts.get(key_of(path)):
            return value.contiguous(memory_format=getattr(torch, layout))
        return value

    return mapped(tree, value_of)


def joined(path: Keys, parts: Sequence[tuple[Any, Any]], dtype: torch.dtype | None = None) -> Any:
    """The value of these parts, each with the shape of the whole, its offsets, and its own shape; or None.

    `dtype`: of tensors that lie in their files as bytes.
    """
    boxes: dict[tuple[int, ...], Tensor] = {}  # by offsets, because replicas may repeat them
    for tensor, about in parts:
        if about is None:
            return tensor
        shape, offsets, part = about
        box = tensor.view(dtype or tensor.dtype).view(part)
        if offsets is None:
            return box if part == shape else box.expand(shape)
        boxes[tuple(offsets)] = box
    has = sum(box.numel() for box in boxes.values())
    if has != math.prod(shape):
        raise UserError(f"{shown_path(path)} has {has} elements of the shape {shape}.")
    return ShardedValue(torch.Size(shape), [(box, at) for at, box in boxes.items()])


def read_old(files: Mapping[str, Path], keys: Sequence[str]) -> dict[str, Any]:
    """What tree.pt has today: the state with its tensors, and what each rank has saved for itself."""
    state = {key: read_saved(files[f"{stem_of(key)}.pt"]) for key in keys}
    boxes: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for name in files:
        for key, each in read_saved(files[name]).items() if name.startswith(SHARDS) else ():
            box, offsets = each["box"], None if each.get("is_plain") else each["offsets"]
            boxes[key].append((box, [each["shape"], offsets, box.shape]))

    def value_of(path: Keys, value: Any) -> Any:
        parts = boxes.get(json.dumps(path)) if value is None else None
        return joined(path, parts) if parts else value

    return {"state": mapped(state, value_of), "ranks": read_saved(files["ranks.pt"])}


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
