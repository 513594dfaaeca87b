"""A tensor is stored as rectangular parts, its boxes. Each has its offsets, so any ranks can read it.

A tensor that all ranks have is a single box. If only some ranks have it, for example those of a pipeline
stage, it is a single box as well, and the lowest of these ranks saves it. The placements of a DTensor say
which box of it a rank has, so the ranks need not agree on a plan. Next to its tensors, a file has notes in
JSON, because the header of safetensors has no place for them:

    "boxes": {"fc.weight": [[10, 64], [5, 0], [5, 64], [0]]}    shape, offsets, own shape, placements
    "tied": {"lm_head.weight": "embedding.weight"}              written once

A file has all tensors row by row. A step copies the boxes into the memory of the host, and the thread that
saves reads them there. contents.py reads the files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flattened  # as DDP has its buckets

from mpiddp.checkpoints import state
from mpiddp.checkpoints.agreement import Union
from mpiddp.checkpoints.folders import SHARDS, SUFFIX, shard_of, stem_of
from mpiddp.checkpoints.state import FlatState, Keys, is_sharded, key_of, name_of, shown_path
from mpiddp.checkpoints.tensor_files import CODES, header_of, write_tensors

_SMALL = 1 << 14  # tensors of so many elements, or fewer, are copied together into one block
_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_JOINED = {getattr(torch, name) for name in _NAMES.split()}  # torch joins tensors of these types
_PART = 1 << 15  # torch examines so few elements in one thread, which leaves cores to the training

Place = tuple[Sequence[int], Sequence[int], Sequence[int | str | None]]


class Box(NamedTuple):
    """The part of a tensor that a rank saves.

    Attributes:
        path, file: of the tensor in the state, and the name of the file for it.
        shape: of the box.
        place: of a box of a DTensor: the shape of the whole tensor, the offsets there, and its placements.
    """

    path: Keys
    file: str
    shape: Sequence[int]
    place: Place | None = None


class Block(NamedTuple):
    """The values of some boxes of a file, one after another, in memory of the CPU."""

    values: Tensor
    boxes: Sequence[Box]


@dataclass
class Copies:
    """The boxes that a rank saves, copied to the memory of the host.

    Attributes:
        blocks: of each file, by its name.
        tied: by the path of a box in a block, the other boxes that have its values.
    """

    blocks: dict[str, list[Block]] = field(default_factory=lambda: defaultdict(list))
    tied: dict[Keys, list[Box]] = field(default_factory=lambda: defaultdict(list))
    _events: list[torch.Event] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Sequence[tuple[Box, Tensor]]) -> Copies:
        """Copy the tensors of the boxes, each into a block of its own, or small ones of a file together.

        Tied tensors have one copy, an expanded one has a copy of what it repeats. With a GPU, torch pins the
        memory of the copies and keeps it for the next ones. The copies run on the current stream: later steps
        change the originals only afterwards, and only the reader of the copies waits.
        """
        copies = cls()
        groups: dict[Any, list[tuple[Box, Tensor]]] = defaultdict(list)  # those that share a block
        first: dict[Any, tuple[Box, Tensor]] = {}  # by file and address
        for box, value in pairs:
            before, same = first.setdefault((box.file, value.data_ptr()), (box, value))
            if before is not box and _kind_of(value) == _kind_of(same):
                copies.tied[before.path].append(box)
                continue
            is_small = 0 < value.numel() <= _SMALL and value.dtype in _JOINED
            alone = () if is_small and value.is_contiguous() else box.path
            groups[box.file, value.device, value.dtype, alone].append((box, value))
        with torch.inference_mode(False), torch.no_grad():
            # The widest elements come first in a file, so that all are aligned.
            for group in sorted(groups.values(), key=lambda group: -_width(group[0])):
                boxes, tensors = zip(*group, strict=True)
                is_alone = len(group) == 1
                block = _unexpanded(tensors[0].detach()) if is_alone else flattened(tensors)
                values = block.to("cpu", non_blocking=True, copy=is_alone)
                copies.blocks[boxes[0].file].append(Block(values, boxes))
        for device in {tensor.device for _, tensor in pairs if tensor.device.type != "cpu"}:
            copies._events.append(torch.Event(device))
            copies._events[-1].record(torch.accelerator.current_stream(device))
        return copies

    def write(self, folder: Path) -> dict[str, str]:
        """Write the files into the folder. Returns the SHA-256 of each by name. Raises OSError."""
        headers = {file: self._header_of(file) for file in self.blocks}
        for event in self._events:
            event.synchronize()
        return {
            file: write_tensors(folder / file, headers[file], [block.values for block in blocks])
            for file, blocks in self.blocks.items()
        }

    def not_finite(self) -> str:
        """A sentence about the first box that has a NaN or an infinity; "" if there is none.

        A tensor of infinities and zeros is fine, because it is a mask.
        """
        for block in [block for blocks in self.blocks.values() for block in blocks]:
            rest = block.values.reshape(-1)
            for box in block.boxes if not _is_finite(rest) else ():
                part, rest = rest[: math.prod(box.shape)], rest[math.prod(box.shape) :]
                bad = part[~part.isfinite()]
                if bad.isnan().any() or (len(bad) and part[part.isfinite()].any()):
                    path = min(shown_path(tied.path) for tied in self.tied_to(box))
                    return f"{path} has {bad[0].item()}"
        return ""

    def tied_to(self, box: Box) -> list[Box]:
        """The box of a block, and the tied ones, which have the same values."""
        return [box, *self.tied.get(box.path, ())]

    def _header_of(self, file: str) -> bytes:
        rows, end = dict[str, Any](), 0
        notes: dict[str, dict[str, Any]] = {"boxes": {}, "tied": {}}
        for values, boxes in self.blocks[file]:
            code, most, width = CODES.get(values.dtype), values.numel(), values.element_size()
            for box in boxes:
                start, size = end, math.prod(box.shape)
                end = start + min(size, most) * width
                part = box.shape if size <= most else values.shape  # of an expanded tensor
                name = _name_of(box)
                shape = list(part) if code else [end - start]
                rows[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [start, end]}
                for tied in self.tied_to(box):
                    alias = _name_of(tied)
                    if tied is not box:
                        notes["tied"][alias] = name
                    if tied.place or code is None or part is not box.shape:
                        whole, offsets, placements = tied.place or (tied.shape, None, ())
                        place = [list(whole), offsets, list(part), list(placements)]
                        notes["boxes"][alias] = place
        return header_of(rows, notes)


def _name_of(box: Box) -> str:
    """The name of a box in its file."""
    return key_of(box.path) if box.file.startswith(SHARDS) else name_of(box.path[1:] or box.path)


def _kind_of(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()


def _unexpanded(value: Tensor) -> Tensor:
    """The part of an expanded tensor that it repeats. Such a dimension has the stride 0."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _is_finite(flat: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity. Those of fp8 and fp4 have scales of their own."""
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if not flat.is_floating_point() or flat.element_size() == 1:
        return True
    extremes = (torch.aminmax(part) for part in flat.split(_PART) if part.numel())
    return all(math.isfinite(low) and math.isfinite(high) for low, high in extremes)


# The boxes of a rank


def boxes_of(flat: FlatState, union: Union, rank: int, *, is_writer: bool) -> list[tuple[Box, Tensor]]:
    """The boxes that this rank saves, with their tensors."""
    pairs = []
    for path, tensor in flat.tensors.items():
        savers, place = union.savers.get(path), None
        if is_sharded(tensor):
            if savers not in (None, state.mesh_of(tensor)) or not _saves(tensor):
                continue
            part, offsets = state.own_part(tensor)
            dims = [_dim_of(placement) for placement in tensor.placements]  # type: ignore[attr-defined]
            place = tensor.shape, offsets, dims
            tensor, file = part.contiguous(), shard_of(rank)
        elif savers is not None:
            if savers != (rank,):
                continue
            file = shard_of(rank)
        elif is_writer:
            file = f"{stem_of(path[0])}{SUFFIX}"
        else:
            continue
        pairs.append((Box(path, file, tensor.shape, place), tensor))
    return pairs


def _width(pair: tuple[Box, Tensor]) -> int:
    return pair[1].element_size()


def _dim_of(placement: Any) -> int | str | None:
    """The dimension that a placement shards; None if its ranks have the same; else its name."""
    if placement.is_replicate():
        return None
    return placement.dim if type(placement).__name__ == "Shard" else type(placement).__name__


def _saves(tensor: Any) -> bool:
    """Whether this rank saves its box of a DTensor. If several have it, as under HSDP, the first one does."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank has no part of the tensor
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    if any(index and placement.is_replicate() for index, placement in pairs):
        return False
    box, offsets = state.own_part(tensor)
    # Some ranks have no part of a tensor that is shorter than their number.
    return bool(box.numel() or not any(offsets))


def write_whole(entries: Mapping[str, Any], folder: Path) -> Any:
    """Write the files of a state whose tensors are whole, on the CPU. Returns its tree. Raises OSError."""
    flat = FlatState("state", entries)
    pairs = boxes_of(flat, Union(flat.tree), 0, is_writer=True)
    copies = Copies()  # they are the tensors themselves, because these do not change
    for box, tensor in sorted(pairs, key=_width, reverse=True):
        copies.blocks[box.file].append(Block(tensor, [box]))
    copies.write(folder)
    return flat.tree
