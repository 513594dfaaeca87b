"""Everything is boxes: a state is a tree, and files with boxes of its tensors, which any ranks read.

The tree has a type in the place of each tensor. A tensor that all ranks have is a single box, and so is one
that only some have, such as that of a pipeline's stage: the lowest of them saves it. The placements of a
DTensor say which box of it a rank has, so the ranks need no plan that they would have to agree on. Beside
its tensors, a file tells in JSON what the header of safetensors cannot:

    "boxes": {"model/fc.weight": [[10, 64], [5, 0], [5, 64]]}     shape, offsets and the box's own shape
    "tied": {"lm_head.weight": "embedding.weight"}                written once
    "layouts": {"conv1.weight": "channels_last"}                  of memory; a file has all row by row

A step copies the boxes into the memory of the host, and the thread that saves reads them there. values.py
reads the files.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
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
_PER_TURN = 100  # tensors; a fraction of a turn


@dataclass
class Boxes:
    """What a rank saves of the tensors of a state. Lists, because gc would count an object for each tensor.

    Attributes:
        paths, files, shapes: of each box.
        places: of boxes of DTensors, by number: the shape of the whole tensor, and the offsets there.
        layouts: of whole tensors that lie in memory otherwise than row by row, by number.
        blocks, file_of: copies of the boxes on the CPU, in blocks of memory; the file of each block.
        block_of, start_of: for each box its block, and its first element there.
    """

    paths: list[Keys] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    shapes: list[Sequence[int]] = field(default_factory=list)
    places: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    layouts: dict[int, str] = field(default_factory=dict)
    blocks: list[Tensor] = field(default_factory=list)
    file_of: list[str] = field(default_factory=list)
    block_of: list[int] = field(default_factory=list)
    start_of: list[int] = field(default_factory=list)
    _events: list[torch.Event] = field(default_factory=list)

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but the values: equal for two saves whose files have the same headers."""
        kinds = [(each.shape, each.dtype) for each in self.blocks]
        boxes = self.paths, self.files, self.shapes, self.places, self.layouts
        return *boxes, self.file_of, self.block_of, self.start_of, kinds

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the boxes, each into a block of its own, or small ones of a file together.

        Tied tensors have one copy, an expanded one has a copy of what it repeats. With a GPU, torch pins the
        memory of the copies and keeps it for the next ones. The copies run on the current stream: later steps
        change the originals only afterwards, and only the reader of the copies waits.
        """
        self.block_of, self.start_of = [0] * len(tensors), [0] * len(tensors)
        groups: dict[Any, list[int]] = defaultdict(list)  # numbers of tensors that share a block
        tied: dict[int, int] = {}
        first: dict[int, int] = {}  # the number of the first tensor at an address
        for number, value in enumerate(tensors):
            file, before = self.files[number], first.setdefault(value.data_ptr(), number)
            if before < number and self.files[before] == file and _is_same(value, tensors[before]):
                tied[number] = before
                continue
            is_small = 0 < value.numel() <= _SMALL and value.dtype in _JOINED
            is_joined = is_small and value.is_contiguous()
            groups[file, value.device, value.dtype, -1 if is_joined else number].append(number)
        with torch.inference_mode(False), torch.no_grad():
            for numbers in _widest_first(tensors, groups.values()):
                group = [tensors[number] for number in numbers]
                is_alone = len(group) == 1
                block = _unexpanded(group[0].detach()) if is_alone else flattened(group)
                self.hold(block.to("cpu", non_blocking=True, copy=is_alone), numbers)
        for number, before in tied.items():
            self.block_of[number] = self.block_of[before]
            self.start_of[number] = self.start_of[before]
        for device in {each.device for each in tensors if each.device.type != "cpu"}:
            self._events.append(torch.Event(device))
            self._events[-1].record(torch.accelerator.current_stream(device))

    def hold(self, block: Tensor, numbers: Sequence[int]) -> None:
        """Add a block with the boxes of these numbers, one after another."""
        start = 0
        for number in numbers:
            self.block_of[number], self.start_of[number] = len(self.blocks), start
            start += math.prod(self.shapes[number])
        self.blocks.append(block)
        self.file_of.append(self.files[numbers[0]])

    def wait(self) -> None:
        """Wait until the copies are done."""
        for event in self._events:
            event.synchronize()

    def not_finite(self) -> dict[Keys, float]:
        """The boxes that have a NaN, or else an infinity, and which."""
        bad: dict[Keys, float] = {}
        is_bad = [not math.isfinite(_worst(each)) for each in self.blocks]
        for number in [at for at, index in enumerate(self.block_of) if is_bad[index]]:
            block, start = self.blocks[self.block_of[number]], self.start_of[number]
            value = _worst(block.reshape(-1)[start : start + math.prod(self.shapes[number])])
            if not math.isfinite(value):
                bad[self.paths[number]] = value
        return bad


def boxes_of(
    outline: Outline, union: Union, rank: int, *, is_writer: bool
) -> tuple[Boxes, list[Tensor]]:
    """What this rank saves: the boxes, and their tensors. Not a collective."""
    boxes, tensors = Boxes(), list[Tensor]()
    file_of = {key: f"{stem_of(key)}{SUFFIX}" for key in union.tree}
    for path, tensor in zip(outline.paths, outline.tensors, strict=True):
        savers = union.savers.get(path)
        if is_sharded(tensor):
            if savers not in (None, mesh_of(tensor)) or not _saves(path, tensor):
                continue
            part, offsets = own_part(tensor)
            boxes.places[len(tensors)] = (tensor.shape, offsets)
            tensor, file = part.contiguous(), shard_of(rank)
        elif savers is not None:
            if savers != (rank,):
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


def _widest_first(tensors: Sequence[Tensor], groups: Iterable[list[int]]) -> list[list[int]]:
    """Groups of the numbers of tensors in the order of their files, in which all are aligned."""
    return sorted(groups, key=lambda numbers: -tensors[numbers[0]].element_size())


def _is_same(a: Tensor, b: Tensor) -> bool:
    kinds = [(each.dtype, each.shape, each.stride(), each.is_conj()) for each in (a, b)]
    return kinds[0] == kinds[1]


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


def headers_of(boxes: Boxes, turns: Turns) -> dict[str, bytes]:
    """The header of each file, by its name. The values of the copies may still be under way."""
    rows = defaultdict[str, list[str]](list)
    beside: dict[str, dict[str, Any]] = {
        file: {"boxes": {}, "tied": {}, "layouts": {}} for file in boxes.file_of
    }
    sizes = dict.fromkeys(boxes.file_of, 0)  # bytes
    begin_of = [0] * len(boxes.blocks)
    for index, (file, block) in enumerate(zip(boxes.file_of, boxes.blocks, strict=True)):
        begin_of[index] = sizes[file]
        sizes[file] += block.numel() * block.element_size()
    kinds = [
        (CODES.get(each.dtype), each.shape, each.numel(), each.element_size())
        for each in boxes.blocks
    ]
    written: dict[tuple[int, int], str] = {}
    each_box = zip(
        boxes.block_of, boxes.start_of, boxes.paths, boxes.shapes, boxes.files, strict=True
    )
    for number, (index, start, path, shape, file) in enumerate(each_box):
        if number % _PER_TURN == 0:
            turns.rest()
        code, repeated, most, width = kinds[index]
        name = key_of(path) if file.startswith(SHARDS) else name_of(path[1:] or path)
        size = math.prod(shape)
        part = shape if size <= most else repeated  # of an expanded one
        if number in boxes.places or code is None or part is not shape:
            whole, offsets = boxes.places.get(number, (shape, None))
            beside[file]["boxes"][name] = [list(whole), offsets, list(part)]
        if number in boxes.layouts:
            beside[file]["layouts"][name] = boxes.layouts[number]
        if (same := written.setdefault((index, start), name)) != name:
            beside[file]["tied"][name] = same
            continue
        begin = begin_of[index] + start * width
        end = begin + min(size, most) * width
        rows[file].append(row_of(name, code or "U8", part if code else [end - begin], begin, end))
    turns.rest()
    return {file: header_of(rows[file], each) for file, each in beside.items()}


def write_boxes(boxes: Boxes, headers: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Write the files into the folder, and return the SHA-256 of each by name. Raises OSError."""
    blocks = defaultdict[str, list[Tensor]](list)
    for file, block in zip(boxes.file_of, boxes.blocks, strict=True):
        blocks[file].append(block)
    return {file: write_tensors(folder / file, headers[file], blocks[file]) for file in headers}


def write_whole(state: Mapping[str, Any], folder: Path) -> Any:
    """Write the files of a state whose tensors are whole, on the CPU. Returns its tree. Raises OSError."""
    outline = Outline("state", state)
    boxes, tensors = boxes_of(outline, Union(outline.tree), 0, is_writer=True)
    boxes.block_of, boxes.start_of = [0] * len(tensors), [0] * len(tensors)
    for numbers in _widest_first(tensors, [[number] for number in range(len(tensors))]):
        boxes.hold(tensors[numbers[0]], numbers)
    write_boxes(boxes, headers_of(boxes, Turns(threading.Event())), folder)
    return outline.tree
