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

from mpiddp.checkpoints import state
from mpiddp.checkpoints.agreement import Union
from mpiddp.checkpoints.folders import SHARDS, SUFFIX, shard_of, stem_of
from mpiddp.checkpoints.state import FlatState, Keys, is_sharded, key_of, name_of, shown_path
from mpiddp.checkpoints.tensor_files import CODES, header_of, write_tensors

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


@dataclass
class Copies:
    """The boxes that a rank saves, copied to the memory of the host.

    Attributes:
        files: by name, the boxes of a file, and their values in memory of the CPU.
        tied: by the path of a box of a file, the other boxes that have its values.
    """

    files: dict[str, list[tuple[Box, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    tied: dict[Keys, list[Box]] = field(default_factory=lambda: defaultdict(list))
    _events: list[torch.Event] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Sequence[tuple[Box, Tensor]]) -> Copies:
        """Copy the tensors of the boxes. Tied ones have one copy, an expanded one has a copy of what it repeats.

        With a GPU, torch pins the memory of the copies and keeps it for the next ones. The copies run on the
        current stream: later steps change the originals only afterwards, and only the copies' reader waits.
        """
        copies = cls()
        first: dict[Any, tuple[Box, Tensor]] = {}  # by file and address
        with torch.inference_mode(False), torch.no_grad():
            for box, value in widest_first(pairs):
                before, same = first.setdefault((box.file, value.data_ptr()), (box, value))
                if before is not box and _kind_of(value) == _kind_of(same):
                    copies.tied[before.path].append(box)
                else:
                    copy = _unexpanded(value.detach()).to("cpu", non_blocking=True, copy=True)
                    copies.files[box.file].append((box, copy))
        for device in {tensor.device for _, tensor in pairs if tensor.device.type != "cpu"}:
            copies._events.append(torch.Event(device))
            copies._events[-1].record(torch.accelerator.current_stream(device))
        return copies

    def write(self, folder: Path) -> dict[str, str]:
        """Write the files into the folder. Returns the SHA-256 of each by name. Raises OSError."""
        headers = {file: self._header_of(rows) for file, rows in self.files.items()}
        for event in self._events:
            event.synchronize()
        return {
            file: write_tensors(folder / file, headers[file], [values for _, values in rows])
            for file, rows in self.files.items()
        }

    def not_finite(self) -> str:
        """A sentence about the first box that has a NaN or an infinity; "" if there is none.

        A tensor of infinities and zeros is fine, because it is a mask.
        """
        for box, values in [row for rows in self.files.values() for row in rows]:
            if not _is_finite(values):
                bad = values[~values.isfinite()]
                if bad.isnan().any() or values[values.isfinite()].any():
                    path = min(shown_path(tied.path) for tied in self.tied_to(box))
                    return f"{path} has {bad[0].item()}"
        return ""

    def tied_to(self, box: Box) -> list[Box]:
        """The box of a file, and the tied ones, which have the same values."""
        return [box, *self.tied.get(box.path, ())]

    def _header_of(self, boxes: Sequence[tuple[Box, Tensor]]) -> bytes:
        rows, end = dict[str, Any](), 0
        notes: dict[str, dict[str, Any]] = {"boxes": {}, "tied": {}}
        for box, values in boxes:
            code, part = (
                CODES.get(values.dtype),
                tuple(values.shape),
            )  # less than the box's, if it is expanded
            start, end = end, end + values.numel() * values.element_size()
            name = _name_of(box)
            shape = part if code else (end - start,)
            rows[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": (start, end)}
            for tied in self.tied_to(box):
                alias = name if tied is box else _name_of(tied)
                if tied is not box:
                    notes["tied"][alias] = name
                if tied.place or code is None or part != tuple(box.shape):
                    whole, offsets, placements = tied.place or (tied.shape, None, ())
                    notes["boxes"][alias] = [list(whole), offsets, part, list(placements)]
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


def _is_finite(value: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity. Those of fp8 and fp4 have scales of their own."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point() or value.element_size() == 1:
        return True
    parts = value.reshape(-1).split(_PART) if value.numel() > _PART else (value,)
    extremes = (torch.aminmax(part) for part in parts if part.numel())
    return all(math.isfinite(low) and math.isfinite(high) for low, high in extremes)


# The boxes of a rank


def boxes_of(
    flat: FlatState, union: Union, rank: int, *, is_writer: bool
) -> list[tuple[Box, Tensor]]:
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


def widest_first(pairs: Sequence[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
    """The boxes of the widest elements come first in a file, so that all are aligned."""
    return sorted(pairs, key=lambda pair: -pair[1].element_size())


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
    for box, tensor in widest_first(pairs):
        copies.files[box.file].append((box, tensor))
    copies.write(folder)
    return flat.tree
