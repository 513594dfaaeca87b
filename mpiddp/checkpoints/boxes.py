"""Everything is boxes: a state is a tree, and files with boxes of its tensors, which any ranks read.

The tree has a type in the place of each tensor. A tensor that all ranks have is a single box. A tensor that
only some have, such as that of a pipeline's stage, is one as well: the lowest of these ranks saves it. The
placements of a DTensor say which box of it a rank has, so the ranks need no plan that they would have to
agree on. Beside its tensors, a file tells in JSON what the header of safetensors cannot:

    "boxes": {"model/fc.weight": [[10, 64], [5, 0], [5, 64]]}     shape, offsets and the box's own shape
    "tied": {"lm_head.weight": "embedding.weight"}                written once
    "layouts": {"conv1.weight": "channels_last"}                  of memory; a file has all row by row

A step copies the boxes into the memory of the host, and the thread that saves reads them there. contents.py
reads the files.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flattened  # as DDP has its buckets

from mpiddp.checkpoints.files import CODES, Turns, header_of, row_of, write_tensors
from mpiddp.checkpoints.folder import SHARDS, SUFFIX, shard_of, stem_of
from mpiddp.checkpoints.state import (
    Keys,
    Outline,
    Union,
    is_sharded,
    key_of,
    mesh_of,
    name_of,
    own_part,
)

_SMALL = 1 << 14  # elements of a tensor that is copied in one block with others
_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_JOINED = {getattr(torch, name) for name in _NAMES.split()}  # types of which torch joins tensors
_PART = 1 << 15  # elements that torch examines in one thread, beside those of the training


class Box(NamedTuple):
    """What a rank saves of a tensor of the state.

    Attributes:
        path, file: of the tensor in the state, and the name of the file for it.
        shape: of the box.
        place: of a box of a DTensor: the shape of the whole tensor, and the offsets there.
        layout: of a whole tensor that lies in memory otherwise than row by row.
    """

    path: Keys
    file: str
    shape: Sequence[int]
    place: tuple[Sequence[int], Sequence[int]] | None = None
    layout: str = ""


class Block(NamedTuple):
    """The values of some boxes of a file, one after another, in memory of the CPU."""

    values: Tensor
    boxes: Sequence[Box]


@dataclass
class Copies:
    """What a rank saves, copied to the host.

    Attributes:
        blocks: of each file, by its name.
        tied: by the path of a box in a block, those that have its values too.
    """

    blocks: dict[str, list[Block]] = field(default_factory=lambda: defaultdict(list))
    tied: dict[Keys, list[Box]] = field(default_factory=lambda: defaultdict(list))
    _events: list[torch.Event] = field(default_factory=list)

    @classmethod
    def of(cls, boxes: Sequence[Box], tensors: Sequence[Tensor]) -> Copies:
        """Copy the tensors of the boxes, each into a block of its own, or small ones of a file together.

        Tied tensors have one copy, an expanded one has a copy of what it repeats. With a GPU, torch pins the
        memory of the copies and keeps it for the next ones. The copies run on the current stream: later steps
        change the originals only afterwards, and only the reader of the copies waits.
        """
        copies = cls()
        groups: dict[Any, list[int]] = defaultdict(list)  # numbers of tensors that share a block
        first: dict[Any, int] = {}  # the number of the first tensor at an address
        for number, (box, value) in enumerate(zip(boxes, tensors, strict=True)):
            before = first.setdefault((box.file, value.data_ptr()), number)
            if before < number and _kind_of(value) == _kind_of(tensors[before]):
                copies.tied[boxes[before].path].append(box)
                continue
            is_small = 0 < value.numel() <= _SMALL and value.dtype in _JOINED
            is_joined = is_small and value.is_contiguous()
            groups[box.file, value.device, value.dtype, -1 if is_joined else number].append(number)
        with torch.inference_mode(False), torch.no_grad():
            for numbers in sorted(groups.values(), key=lambda each: _order(tensors[each[0]])):
                group = [tensors[number] for number in numbers]
                is_alone = len(group) == 1
                block = _unexpanded(group[0].detach()) if is_alone else flattened(group)
                values = block.to("cpu", non_blocking=True, copy=is_alone)
                own = [boxes[number] for number in numbers]
                copies.blocks[own[0].file].append(Block(values, own))
        for device in {each.device for each in tensors if each.device.type != "cpu"}:
            copies._events.append(torch.Event(device))
            copies._events[-1].record(torch.accelerator.current_stream(device))
        return copies

    def wait(self) -> None:
        """Wait until the copies are done."""
        for event in self._events:
            event.synchronize()

    def alike(self, box: Box) -> list[Box]:
        """The box of a block, and those that have its values too."""
        return [box, *self.tied.get(box.path, ())]

    def not_finite(self) -> dict[Keys, float]:
        """The boxes that have a NaN, or else an infinity, and which."""
        bad: dict[Keys, float] = {}
        for block in [each for blocks in self.blocks.values() for each in blocks]:
            if math.isfinite(_worst(block.values)):
                continue
            start = 0
            for box in block.boxes:
                end = start + math.prod(box.shape)
                value = _worst(block.values.reshape(-1)[start:end])
                start = end
                if not math.isfinite(value):
                    bad |= {each.path: value for each in self.alike(box)}
        return bad


def boxes_of(
    outline: Outline, union: Union, rank: int, *, is_writer: bool
) -> tuple[list[Box], list[Tensor]]:
    """What this rank saves: the boxes, and their tensors. Not a collective."""
    boxes, tensors = list[Box](), list[Tensor]()
    for path, tensor in zip(outline.paths, outline.tensors, strict=True):
        savers, place = union.savers.get(path), None
        if is_sharded(tensor):
            if savers not in (None, mesh_of(tensor)) or not _saves(path, tensor):
                continue
            part, offsets = own_part(tensor)
            place = tensor.shape, offsets
            tensor, file = part.contiguous(), shard_of(rank)
        elif savers is not None:
            if savers != (rank,):
                continue
            file = shard_of(rank)
        elif is_writer:
            file = f"{stem_of(path[0])}{SUFFIX}"
        else:
            continue
        boxes.append(Box(path, file, tensor.shape, place, _layout_of(tensor)))
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


def _order(tensor: Tensor) -> int:
    """Of a tensor in its file: the widest elements come first, so that all are aligned."""
    return -tensor.element_size()


def _kind_of(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()


def _unexpanded(value: Tensor) -> Tensor:
    """The part of a tensor that its dimensions of stride 0 repeat."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _worst(value: Tensor) -> float:
    """NaN if a tensor has one, else an infinity that it has, else 0."""
    worst = 0.0
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point() or value.element_size() == 1:
        return worst  # fp8 and fp4 have scales beside them
    for part in value.reshape(-1).split(_PART):
        for found in torch.aminmax(part) if part.numel() else ():
            number = found.item()
            if math.isnan(number):
                return number
            worst = worst if math.isfinite(number) else number
    return worst


# Written


def headers_of(copies: Copies, turns: Turns) -> dict[str, bytes]:
    """The header of each file, by its name. The values of the copies may still be under way."""
    return {file: _header_of(file, copies, turns) for file in copies.blocks}


def _header_of(file: str, copies: Copies, turns: Turns) -> bytes:
    rows, end = list[str](), 0
    beside: dict[str, dict[str, Any]] = {"boxes": {}, "tied": {}, "layouts": {}}
    for values, boxes in copies.blocks[file]:
        code, most, width = CODES.get(values.dtype), values.numel(), values.element_size()
        for box in boxes:
            turns.rest()
            start, size = end, math.prod(box.shape)
            end = start + min(size, most) * width
            part = box.shape if size <= most else values.shape  # of an expanded one
            name = _name_of(box)
            rows.append(row_of(name, code or "U8", part if code else [end - start], start, end))
            for each in copies.alike(box):
                own = _name_of(each)
                if each is not box:
                    beside["tied"][own] = name
                if each.place or code is None or part is not box.shape:
                    whole, offsets = each.place or (each.shape, None)
                    beside["boxes"][own] = [list(whole), offsets, list(part)]
                if each.layout:
                    beside["layouts"][own] = each.layout
    return header_of(rows, beside)


def _name_of(box: Box) -> str:
    """The name of a box in its file."""
    return key_of(box.path) if box.file.startswith(SHARDS) else name_of(box.path[1:] or box.path)


def write_boxes(copies: Copies, headers: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Write the files into the folder, and return the SHA-256 of each by name. Raises OSError."""
    return {
        file: write_tensors(folder / file, headers[file], [each.values for each in blocks])
        for file, blocks in copies.blocks.items()
    }


def write_whole(state: Mapping[str, Any], folder: Path) -> Any:
    """Write the files of a state whose tensors are whole, on the CPU. Returns its tree. Raises OSError."""
    outline = Outline("state", state)
    boxes, tensors = boxes_of(outline, Union(outline.tree), 0, is_writer=True)
    copies = Copies()  # none of these
    for tensor, box in sorted(zip(tensors, boxes, strict=True), key=lambda each: _order(each[0])):
        copies.blocks[box.file].append(Block(tensor, [box]))
    write_boxes(copies, headers_of(copies, Turns(threading.Event())), folder)
    return outline.tree
