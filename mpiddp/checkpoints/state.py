"""The state that a program saves: one walk over it, and what it may hold.

A state holds whatever torch.load reads again with weights_only, and DTensors. Every value has exactly one of
the types below. A subclass, such as numpy.float64 for a float, would be saved as code, and refused when it
is read.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

Keys = tuple[Any, ...]  # the path to a value

_SCALARS = (int, float, bool, str, type(None))
DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
LISTS = (list, tuple)
_LONGEST_NAME = 200  # bytes of a file's name, without its ending
SHARDS = "shard_"  # begins the names of the files of shards, and no key of a state
_PLAIN = re.compile(r"(?!-?[0-9]+$)[^/\[][^/]*")  # a key that is no number, JSON or several keys


def mapped(nested: Any, change: Callable[[Keys, Any], Any], path: Keys = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    kind = type(nested)
    if kind in DICTS:
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        if kind is dict:
            return changed
        copied = kind(changed)
        copied.__dict__.update(nested.__dict__)  # a module's state_dict keeps its versions there
        return copied
    if kind in LISTS:
        return kind(mapped(value, change, (*path, index)) for index, value in enumerate(nested))
    return change(path, nested)


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


# What may be saved


class Outline:
    """What a rank saves: the state with types in place of its tensors; these and their paths, in order."""

    def __init__(self, name: str, entries: Mapping[str, Any]) -> None:
        """Check the argument `name` of a save. Raises TypeError or ValueError, see `Checkpoints.save`."""
        if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
            raise TypeError(f'{name}: expected a dict with names as keys: {{"model": …}}')
        self._name = name
        self.paths, self.tensors = list[Keys](), list[Tensor]()
        self.tree = mapped(dict(entries), self._take)
        for key in entries if name == "state" else ():
            stem = stem_of(key)
            if not stem or len(stem) > _LONGEST_NAME or stem.startswith(SHARDS):
                raise ValueError(
                    f"state: the key {key[:_LONGEST_NAME]!r} cannot be the name of a file in the checkpoint. "
                    "Use another one."
                )

    def _take(self, path: Keys, value: Any) -> Any:
        bad = [index for index, key in enumerate(path) if type(key) not in _SCALARS]
        problem = _problem_of(value, is_shared=self._name == "state")
        if bad:
            problem = f"a key of type {_type_name(path[bad[0]])}. Use strings or numbers as keys"
            path = path[: bad[0]]
        if problem:
            raise TypeError(f"{shown_path(path, self._name)}: {problem}.")
        if type(value) in _SCALARS:
            return value
        if value.is_quantized:  # it is more than its elements
            return value.detach().to("cpu", copy=True)
        self.paths.append(path)
        self.tensors.append(value)
        return value.dtype

    def filled(self, values: Iterable[Any]) -> dict[str, Any]:
        """The state with these in the places of its tensors."""
        rest = iter(values)
        filled: dict[str, Any] = mapped(
            self.tree, lambda _, value: next(rest) if type(value) is torch.dtype else value
        )
        return filled


def shown_path(path: Keys, name: str = "state") -> str:
    """The path for a sentence: state['model']['fc.weight']."""
    return name + "".join(f"[{key!r}]" for key in path)


@functools.cache
def stem_of(key: str) -> str:
    """The name of the key's file, without its suffix: letters, digits, and % in place of anything else."""
    return quote(key, safe="")


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


def _problem_of(value: Any, *, is_shared: bool) -> str:
    """Why the value cannot be saved, "" if it can."""
    kind = type(value)
    if is_sharded(value):
        if not is_shared:
            return "cannot save a DTensor, which all ranks share. Save it in state"
        if any(placement.is_partial() for placement in value.placements):
            return "cannot save a DTensor whose ranks hold summands: redistribute it"
    elif kind is Tensor or kind is torch.nn.Parameter:
        if value.layout is not torch.strided:
            return f"cannot save a tensor in the layout {value.layout}"
        if value.is_meta:
            return "cannot save a tensor on meta, which has no values"
    elif kind not in _SCALARS:
        return (
            f"cannot save {_type_name(value)}. Expected tensors, numbers, strings, None, lists and dicts "
            "of these: convert it, for example with .item(), .tolist() or .state_dict()"
        )
    return ""


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"
