"""Everything is boxes: a state is a tree, and files with boxes of its tensors, which any ranks read.

    tree.pt                    the state with a type in the place of each tensor
    model.safetensors          the tensors of the entry "model" that every host has: boxes that are whole
    shard_00001.safetensors    the boxes of rank 1 of everything else

A tensor that only some ranks have, such as one of a pipeline's stage, is a single box of the lowest of them.
The placements of a DTensor say which box of it a rank has, so the ranks need no plan that they would have to
agree on. Beside its tensors, a file tells in JSON what the header of safetensors cannot:

    "boxes": {"model/fc.weight": [[10, 64], [5, 0], [5, 64]]}     shape, offsets and the box's own shape
    "tied": {"lm_head.weight": "embedding.weight"}                written once
    "layouts": {"conv1.weight": "channels_last"}                  of memory; a file has all row by row
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mpiddp.checkpoints.files import (
    CODES,
    SUFFIX,
    Turns,
    header_of,
    read_tensors,
    row_of,
    write_tensors,
)
from mpiddp.checkpoints.host import Copies
from mpiddp.checkpoints.state import (
    SHARDS,
    Keys,
    Outline,
    is_sharded,
    mapped,
    mesh_of,
    own_part,
    shown_path,
    stem_of,
)
from mpiddp.checkpoints.union import Union
from mpiddp.errors import UserError

_PLAIN = re.compile(r"(?!-?[0-9]+$)[^/\[][^/]*")  # a key that is no number, JSON or several keys
_PER_TURN = 100  # tensors; a fraction of a turn


def shard_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"{SHARDS}{rank:05d}{SUFFIX}"


def _name_of(keys: Keys) -> str:
    """The name of a tensor, which no other keys have: "fc.weight", "state/0/exp_avg", or JSON."""
    for key in keys:
        is_plain = type(key) is int or (type(key) is str and _PLAIN.fullmatch(key))
        if not is_plain:
            return json.dumps(keys)
    return "/".join(map(str, keys))


def _key_of(path: Keys) -> str:
    """The entry's file, a slash, and the name in this file."""
    return f"{stem_of(path[0])}/{_name_of(path[1:] or path)}"


# Written


@dataclass
class Boxes:
    """What a rank saves of the tensors of a state. Lists, because gc would count an object for each tensor.

    Attributes:
        paths, files, shapes: of each box.
        places: of boxes of DTensors, by number: the shape of the whole tensor, and the offsets there.
        layouts: of whole tensors that lie in memory otherwise than row by row, by number.
    """

    paths: list[Keys] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    shapes: list[Sequence[int]] = field(default_factory=list)
    places: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    layouts: dict[int, str] = field(default_factory=dict)


def boxes_of(
    outline: Outline, union: Union, rank: int, *, is_writer: bool
) -> tuple[Boxes, list[Tensor]]:
    """What this rank saves: the boxes, and their tensors. Not a collective."""
    boxes, tensors = Boxes(), list[Tensor]()
    file_of = {key: f"{stem_of(key)}{SUFFIX}" for key in union.tree}
    for path, tensor in zip(outline.paths, outline.tensors, strict=True):
        if is_sharded(tensor):
            if union.savers.get(path) not in (None, mesh_of(tensor)) or not _saves(path, tensor):
                continue
            part, offsets = own_part(tensor)
            boxes.places[len(tensors)] = (tensor.shape, offsets)
            tensor, file = part.contiguous(), shard_of(rank)
        elif path in union.boxed:
            if union.savers[path] != (rank,):
                continue
            file = shard_of(rank)
        elif is_writer:
            file = file_of[path[0]]
        else:
            continue
        if layout := _layout_of(tensor):
            boxes.layouts[len(tensors)] = layout
        boxes.paths.append(path)
        boxes.files.append(file)
        boxes.shapes.append(tensor.shape)
        tensors.append(tensor)
    return boxes, tensors


def _layout_of(tensor: Tensor) -> str:
    """The name of its memory format, "" for row by row. A fused optimizer needs that of its parameters."""
    name = {4: "channels_last", 5: "channels_last_3d"}.get(tensor.dim(), "")
    if not name or tensor.is_contiguous():
        return ""
    return name if tensor.is_contiguous(memory_format=getattr(torch, name)) else ""


def _saves(path: Keys, tensor: Any) -> bool:
    """Whether this rank saves its box of a DTensor.

    Of a box that several ranks have, under HSDP for example, one copy is saved. Its path decides which, so
    their ranks save about as much as each other.
    """
    place = tensor.device_mesh.get_coordinate()
    if place is None:  # this rank has no part of the tensor
        return False
    copy, num_copies = 0, 1
    for index, size, placement in zip(
        place, tensor.device_mesh.shape, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            copy, num_copies = copy * size + index, num_copies * size
    box, offsets = own_part(tensor)
    # Some ranks have no part of a tensor that is shorter than their number.
    is_empty = not box.numel() and any(offsets)
    return not is_empty and copy == crc32(json.dumps(path).encode()) % num_copies


@dataclass
class BoxWriter:
    """Writes the files of boxes. It keeps the headers, because the next save has mostly the same tensors."""

    _layout: Any = None
    _headers: dict[str, bytes] = field(default_factory=dict)

    def prepare(self, boxes: Boxes, copies: Copies, turns: Turns) -> None:
        """Make the headers. The values of the copies may still be under way."""
        kinds = [(each.shape, each.dtype) for each in copies.blocks]
        layout = boxes, copies.groups, copies.block_of, copies.start_of, kinds
        if layout != self._layout:
            self._headers = _headers_of(boxes, copies, turns)
            self._layout = layout
        turns.rest()

    def write(self, copies: Copies, folder: Path) -> dict[str, str]:
        """Write the files into the folder, and return the SHA-256 of each by name. Raises OSError."""
        blocks = defaultdict[str, list[Tensor]](list)
        for index in _order(copies):
            blocks[copies.groups[index]].append(copies.blocks[index])
        return {
            name: write_tensors(folder / name, header, blocks[name])
            for name, header in self._headers.items()
        }


def _order(copies: Copies) -> list[int]:
    """The order of the blocks in their files: the widest types first, so that all are aligned."""
    blocks = copies.blocks
    return sorted(range(len(blocks)), key=lambda each: -blocks[each].element_size())


@dataclass
class _Header:
    rows: list[str] = field(default_factory=list)
    boxes: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    size: int = 0  # bytes of the blocks


def _headers_of(boxes: Boxes, copies: Copies, turns: Turns) -> dict[str, bytes]:
    """The header of each file, by its name."""
    headers = defaultdict[str, _Header](_Header)
    starts = [0] * len(copies.blocks)
    for index in _order(copies):
        block, header = copies.blocks[index], headers[copies.groups[index]]
        starts[index] = header.size
        header.size += block.numel() * block.element_size()
    sizes = [(each.numel(), each.element_size()) for each in copies.blocks]
    codes = [CODES.get(each.dtype) for each in copies.blocks]
    written: dict[tuple[int, int], str] = {}
    places = zip(copies.block_of, copies.start_of, boxes.paths, boxes.shapes, strict=True)
    for number, (index, start, path, shape) in enumerate(places):
        if number % _PER_TURN == 0:
            turns.rest()
        file, code, (most, width) = boxes.files[number], codes[index], sizes[index]
        header, part, size = headers[file], shape, math.prod(shape)
        name = _key_of(path) if file.startswith(SHARDS) else _name_of(path[1:] or path)
        if size > most:  # it is expanded, and the block is what it repeats
            part, size = copies.blocks[index].shape, most
        if number in boxes.places or code is None or part is not shape:
            whole, offsets = boxes.places.get(number, (shape, None))
            header.boxes[name] = [list(whole), offsets, list(part)]
        if number in boxes.layouts:
            header.layouts[name] = boxes.layouts[number]
        if (same := written.setdefault((index, start), name)) != name:
            header.tied[name] = same
            continue
        begin = starts[index] + start * width
        end = begin + size * width
        header.rows.append(row_of(name, code or "U8", part if code else [end - begin], begin, end))
    return {
        file: header_of(
            each.rows, {"boxes": each.boxes, "tied": each.tied, "layouts": each.layouts}
        )
        for file, each in headers.items()
    }


def write_whole(state: Mapping[str, Any], folder: Path) -> Any:
    """Write the files of a state whose tensors are whole, on the CPU. Returns its tree. Raises OSError."""
    outline = Outline("state", state)
    boxes, tensors = boxes_of(outline, Union(outline.tree), 0, is_writer=True)
    copies = Copies(tensors, boxes.files, list(range(len(tensors))), [0] * len(tensors))
    writer = BoxWriter()
    writer.prepare(boxes, copies, Turns(threading.Event()))
    writer.write(copies, folder)
    return outline.tree


# Read


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
        parts = found.get(_key_of(path))
        if not parts:
            raise UserError(f"{shown_path(path)} is in none of its files.")
        value = joined(path, leaf, parts)
        if layout := layouts.get(_key_of(path)):
            return value.contiguous(memory_format=getattr(torch, layout))
        return value

    return mapped(tree, value_of)


def joined(path: Keys, dtype: torch.dtype, parts: Sequence[tuple[Tensor, Any]]) -> Any:
    boxes: dict[tuple[int, ...], Tensor] = {}  # by offsets, because replicas may repeat them
    for tensor, about in parts:
        if about is None:
            return tensor
        shape, offsets, part = about
        box = tensor.view(dtype).view(part)
        if offsets is None:
            return box if part == shape else box.expand(shape)
        boxes[tuple(offsets)] = box
    has = sum(box.numel() for box in boxes.values())
    if has != math.prod(shape):
        raise UserError(f"{shown_path(path)} has {has} elements of the shape {shape}.")
    return ShardedValue(torch.Size(shape), [(box, at) for at, box in boxes.items()])


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
