"""A state, flattened: a tree of plain values with a type in the place of each tensor, and the tensors.

A state holds what torch.load reads again with weights_only, DTensors, and objects with a `state_dict`. Values
that only a pickle could restore, such as numpy.float64 or a deque, become their plain forms, and everything
else is refused by its path, before a byte is written.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.folders import SHARDS, stem_of
from mpiddp.errors import UserError

Keys = tuple[Any, ...]  # the path to a value

_SCALARS = (int, float, bool, str, type(None))
DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
LISTS = (list, tuple)
_FORMS: dict[type, Callable[[Any], Any]] = {deque: list, torch.Size: tuple, defaultdict: dict}
_LONGEST_NAME = 200  # bytes of a file's name, without its ending
# A key that cannot be read as a number, as JSON, or as several keys.
_PLAIN = re.compile(r"(?!-?[0-9]+$|__metadata__$)[^/\[][^/]*")
_MAX_BITS = 2039  # torch.load with weights_only reads no longer int
_VERSIONS = "_metadata"  # an attribute of a module's state_dict


def mapped(nested: Any, change: Callable[[Keys, Any], Any], path: Keys = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    kind = type(nested)
    if kind in DICTS:
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        return as_kind_of(nested, changed)
    if kind in LISTS:
        return kind(mapped(value, change, (*path, index)) for index, value in enumerate(nested))
    return change(path, nested)


def leaves(nested: Any) -> list[tuple[Keys, Any]]:
    """The values in these dicts, lists and tuples, with their paths."""
    pairs: list[tuple[Keys, Any]] = []
    mapped(nested, lambda path, value: pairs.append((path, value)))
    return pairs


def as_kind_of(pattern: Any, items: dict[Any, Any]) -> Any:
    """A dict of the same kind. A module's state_dict keeps the versions of its modules in an attribute."""
    if type(pattern) is dict:
        return items
    table = type(pattern)(items)
    table.__dict__.update(pattern.__dict__)
    return table


def is_sharded(value: object) -> bool:
    """Whether the value is torch's DTensor. Does not import its modules, which takes a while."""
    if type(value) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def mesh_of(value: Any) -> tuple[int, ...]:
    """The ranks that share a DTensor; () for another tensor."""
    return tuple(value.device_mesh.mesh.flatten().tolist()) if is_sharded(value) else ()


def own_part(tensor: Any) -> tuple[Tensor, Sequence[int]]:
    """This rank's part of a tensor, and its offsets in the whole tensor."""
    if not is_sharded(tensor):
        return tensor.detach(), [0] * tensor.ndim
    [chunk] = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks as well
    return tensor.to_local().detach(), chunk.offsets


@dataclasses.dataclass(frozen=True)
class ShardedValue:
    """A tensor that is still in its files, in `Resumed.state` in place of the tensor.

    The boxes are those of all ranks, with their offsets, in mapped files, so each is read when it is used.
    `placements`: for each dimension of the mesh that saved it, the dimension of the tensor that the ranks
    divided among them, or None.
    """

    shape: torch.Size
    boxes: Sequence[tuple[Tensor, Sequence[int]]]
    placements: Sequence[int | str | None] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.boxes[0][0].dtype

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective."""
        return self._filled(torch.empty(self.shape, dtype=self.dtype, device="cpu"))

    def read_like(self, like: Any) -> Tensor:
        """The tensor, placed as `like` is. This reads the bytes of this rank only, and is no collective.

        If the shapes differ, as for a factored state of an optimizer, the tensor gets the placements with
        which it was saved, on the mesh of `like`.
        """
        if like.shape == self.shape:
            return self._filled(torch.empty_like(like, dtype=self.dtype, requires_grad=False))
        if not is_sharded(like):
            return self.full_tensor().to(like.device)
        from torch.distributed.tensor import Replicate, Shard, empty

        mesh = like.device_mesh
        fits = len(self.placements) == mesh.ndim
        if fits and any(isinstance(dim, str) for dim in self.placements):
            raise UserError(f"a tensor of shape {list(self.shape)} was saved as {self.placements}")
        dims = self.placements if fits else [None] * mesh.ndim
        places = [Shard(dim) if isinstance(dim, int) else Replicate() for dim in dims]
        return self._filled(
            empty(self.shape, dtype=self.dtype, device_mesh=mesh, placements=places)
        )

    def _filled(self, target: Tensor) -> Tensor:
        """The target, into which this rank's part is read."""
        part, offsets = own_part(target)
        for box, at in self.boxes if part.numel() else ():
            _copy_overlap(box, at, part, offsets)
        return target


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


class FlatState:
    """The state that a rank saves, flattened.

    Attributes:
        tree: the state with types in place of its tensors.
        tensors: by their paths, in the order of the tree.
    """

    def __init__(self, name: str, entries: Mapping[str, Any]) -> None:
        """`name`: of the argument of `Checkpoints.save`, see there for the errors."""
        if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
            raise TypeError(f'{name}: expected a dict with names as keys: {{"model": …}}')
        self._name = name
        self.tensors: dict[Keys, Tensor] = {}
        try:
            self.tree = self._flatten((), dict(entries))
        except RecursionError:
            raise TypeError(f"{name}: cannot save what holds itself, or too many levels.") from None
        for key in entries if name == "state" else ():
            stem = stem_of(key)
            if not stem or len(stem) > _LONGEST_NAME or stem.startswith(SHARDS):
                raise ValueError(
                    f"state: the key {key[:_LONGEST_NAME]!r} cannot be the name of a file in the checkpoint. "
                    "Use another one."
                )

    def with_tensors(self, values: Iterable[Any]) -> dict[str, Any]:
        """The state with these values in the places of its tensors, in their order."""
        rest = iter(values)
        filled: dict[str, Any] = mapped(
            self.tree, lambda _, value: next(rest) if type(value) is torch.dtype else value
        )
        return filled

    def _flatten(self, path: Keys, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS and kind is not int:
            return value
        if kind is Tensor or kind is torch.nn.Parameter or is_sharded(value):
            return self._flatten_tensor(path, value)
        plain = _plain(value)
        if type(plain) is not kind:  # what a state_dict() returns may have a plain form, too
            return self._flatten(path, plain)
        if kind in LISTS:
            rows = (self._flatten((*path, index), row) for index, row in enumerate(value))
            return kind(rows)
        if kind in DICTS:
            if getattr(value, "__dict__", {}).keys() - {_VERSIONS}:
                name = min(value.__dict__.keys() - {_VERSIONS})
                self._refuse(path, f"cannot save the attribute {name} of a dict")
            for key in value:
                if type(key) not in _SCALARS:
                    problem = f"a key of type {_type_name(key)}. Use strings or numbers as keys"
                    self._refuse(path, problem)
            items = {key: self._flatten((*path, key), entry) for key, entry in value.items()}
            table = as_kind_of(value, items)
            if hasattr(table, _VERSIONS):
                table._metadata = self._flatten((*path, _VERSIONS), table._metadata)
            return table
        if kind not in _SCALARS:
            self._refuse(
                path,
                f"cannot save {_type_name(value)}. Expected tensors, numbers, strings, None, lists and dicts "
                "of these: convert it, for example with .tolist() or .state_dict()",
            )
        if kind is int and (bits := value.bit_length()) > _MAX_BITS:
            problem = (
                f"cannot save an int of {bits} bits. Expected {_MAX_BITS} or fewer: convert it"
            )
            self._refuse(path, problem)
        return value

    def _flatten_tensor(self, path: Keys, value: Any) -> Any:
        problem = ""
        if is_sharded(value):
            if self._name != "state":
                problem = "a DTensor, which all ranks share. Save it in state"
            elif any(placement.is_partial() for placement in value.placements):
                problem = "a DTensor whose ranks hold summands: redistribute it"
        elif value.layout is not torch.strided or value.is_nested:
            problem = "a sparse or nested tensor. Convert it, for example with .to_dense()"
        elif value.is_meta:
            problem = "a tensor on meta, which has no values"
        elif value.is_quantized:  # it has a scale besides its elements
            return value.detach().to("cpu", copy=True)
        if problem:
            self._refuse(path, f"cannot save {problem}")
        self.tensors[path] = value
        return value.dtype

    def _refuse(self, path: Keys, problem: str) -> None:
        raise TypeError(f"{shown_path(path, self._name)}: {problem}.")


def _plain(value: Any) -> Any:
    """The plain form of a value that only a pickle could restore, or else the value."""
    kind = type(value)
    if kind in DICTS or kind in LISTS or kind in _SCALARS:
        return value
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return value.state_dict()
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic):
        return value.item()
    if kind in _FORMS:
        return _FORMS[kind](value)
    if kind in (set, frozenset):
        return sorted(value, key=repr)  # the same order on all ranks
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def shown_path(path: Keys, name: str = "state") -> str:
    """The path for a sentence: state['model']['fc.weight']."""
    return name + "".join(f"[{key!r}]" for key in path)


def name_of(keys: Keys) -> str:
    """The name of a tensor, which no other keys have: "fc.weight", "state/0/exp_avg", or JSON."""
    for key in keys:
        is_plain = type(key) is int or (type(key) is str and _PLAIN.fullmatch(key))
        if not is_plain:
            return json.dumps(keys)
    return "/".join(map(str, keys))


def key_of(path: Keys) -> str:
    """The entry's file, a slash, and the name in this file."""
    return f"{stem_of(path[0])}/{name_of(path[1:] or path)}"


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"
