"""The state of a checkpoint, read from its files: whole tensors, and boxes of sharded ones, that ranks map.

Checkpoints of other programs are read too: safetensors, and those of torch.distributed.checkpoint (DCP),
without code. Torch's own reader of DCP unpickles whatever stands in the file.

Earlier versions wrote files of torch.save, and shards with the paths of their tensors:

    model.pt         the entry "model"; None in the places of tensors in shards
    ranks.pt         what each rank has saved for itself
    shard_00001.pt   {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "offsets": [5, 0], "box": …}, …}
"""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.files import DAMAGE, SUFFIX, read_saved, read_tensors, unpacked
from mpiddp.checkpoints.folder import is_checkpoint
from mpiddp.checkpoints.state import SHARDS, Keys, key_of, mapped, own_part, shown_path, stem_of
from mpiddp.errors import UserError, cause_of

_DCP_CLASSES = {  # all that the .metadata of DCP consists of
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
        "TensorProperties _MEM_FORMAT_ENCODING StorageMeta"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath PurePosixPath",
}


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
        value = _joined(path, parts, leaf)
        if layout := layouts.get(key_of(path)):
            return value.contiguous(memory_format=getattr(torch, layout))
        return value

    return mapped(tree, value_of)


def _joined(path: Keys, parts: Sequence[tuple[Any, Any]], dtype: torch.dtype | None = None) -> Any:
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
        return _joined(path, parts) if parts else value

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


# Of other programs


def read_foreign(given: Path) -> dict[str, Any] | None:
    """The state in a checkpoint of another program; None if it is none. Raises UserError or JobFailed."""
    try:
        if (given / ".metadata").is_file():
            return _read_dcp(given)
        files = [given] if given.suffix == SUFFIX else sorted(given.glob(f"*{SUFFIX}"))
        if not files or is_checkpoint(given):
            return None
        return {path.stem: read_tensors(path)[0] for path in files}
    except OSError as error:
        raise cause_of(error)(f"{error.filename or given}: {error.strerror or error}.") from None
    except DAMAGE as error:
        raise UserError(
            f"{given} is damaged, or no checkpoint of DCP or safetensors: {error}."
        ) from None


class _Unpickler(pickle.Unpickler):
    """Reads the tables of DCP, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _DCP_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        raise ValueError(f"its .metadata contains {module}.{name}")


def _read_dcp(given: Path) -> dict[str, Any]:
    try:
        with (given / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(str(error)) from None
    parts = defaultdict(list)
    for index, info in found.storage_data.items():
        if "/" in info.relative_path:
            raise ValueError("it names a file outside of it")
        with (given / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            value = unpacked(file.read(info.length))
        about, shape = None, getattr(found.state_dict_metadata[index.fqn], "size", None)
        if shape is not None:
            offsets = None if value.shape == shape else list(index.offset)
            about = [list(shape), offsets, list(value.shape)]
        parts[index.fqn].append((value, about))
    state: dict[str, Any] = {}
    for name, each in parts.items():
        path = tuple((found.planner_data or {}).get(name, (name,)))
        place: Any = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = _joined(path, each)
    return {key: _with_numbers(value) for key, value in state.items()}


def _with_numbers(nested: Any) -> Any:
    """The same with lists, and with the numbers of an optimizer's parameters as keys.

    DCP has keys that are text, and whole numbers for the places in lists.
    """
    if type(nested) is not dict:
        return nested
    rows = {key: _with_numbers(value) for key, value in nested.items()}
    if rows and all(type(key) is int for key in rows):
        return [rows[key] for key in sorted(rows)]
    if rows and all(str(key).isdigit() for key in rows):
        return {int(key): value for key, value in rows.items()}
    return rows
