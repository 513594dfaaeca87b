"""The state that a program saves: one walk over it, what it may hold, and the union of what all ranks save.

A state holds whatever torch.load reads again with weights_only, and DTensors. Every value has exactly one of
the types below. A subclass, such as numpy.float64 for a float, would be saved as code, and refused when it
is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.folder import SHARDS, stem_of
from mpiddp.checkpoints.run import Run
from mpiddp.errors import UserError
from mpiddp.text import counted, listed

Keys = tuple[Any, ...]  # the path to a value

_SCALARS = (int, float, bool, str, type(None))
DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
LISTS = (list, tuple)
_LONGEST_NAME = 200  # bytes of a file's name, without its ending
_PLAIN = re.compile(r"(?!-?[0-9]+$|__metadata__$)[^/\[][^/]*")  # no number, JSON or several keys
_MAX_BITS = 2039  # of an int that torch.load reads with weights_only
_SAMPLES = 8  # elements of a tensor by which ranks compare it
_MAX_SAMPLED = 1000  # tensors
_TOLERANCE = 0.01  # of the largest one: ranks on different processors differ in the last bits
# Each rank has its own in DDP, and those of the lowest rank are saved.
_OF_EACH_RANK = ("running_mean", "running_var", "num_batches_tracked")
_HINT = "Save what differs under keys of its own, as in {f'optimizer{stage}': …}, or in per_rank."


def mapped(nested: Any, change: Callable[[Keys, Any], Any], path: Keys = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    kind = type(nested)
    if kind in DICTS:
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        return as_kind_of(nested, changed)
    if kind in LISTS:
        return kind(mapped(value, change, (*path, index)) for index, value in enumerate(nested))
    return change(path, nested)


def as_kind_of(known: Any, items: dict[Any, Any]) -> Any:
    """A dict of the kind of a known one. A module's state_dict keeps its versions in an attribute."""
    if type(known) is dict:
        return items
    made = type(known)(items)
    made.__dict__.update(known.__dict__)
    return made


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
        try:
            self.tree = mapped(dict(entries), self._take)
        except RecursionError:
            raise TypeError(f"{name}: cannot save what holds itself, or too many levels.") from None
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
        if value.layout is not torch.strided or value.is_nested:
            return "cannot save a sparse or nested tensor. Convert it, for example with .to_dense()"
        if value.is_meta:
            return "cannot save a tensor on meta, which has no values"
    elif kind not in _SCALARS:
        return (
            f"cannot save {_type_name(value)}. Expected tensors, numbers, strings, None, lists and dicts "
            "of these: convert it, for example with .item(), .tolist() or .state_dict()"
        )
    elif kind is int and value.bit_length() > _MAX_BITS:
        return f"cannot save an int of {value.bit_length()} bits. Expected {_MAX_BITS} or fewer: convert it"
    return ""


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


# The union: the same on all ranks, or refused before a byte is written


@dataclass
class Union:
    """What all ranks together save.

    Attributes:
        tree: the state with a type in the place of each tensor.
        savers: the ranks that save a tensor, by path: those of a DTensor's mesh, or the lowest that has a
            plain one which not every writer has. {} if all ranks have the same.
        is_partial: some ranks have tensors that others do not.
    """

    tree: Any
    savers: dict[Keys, tuple[int, ...]] = field(default_factory=dict)
    is_partial: bool = False


def digest_of(outline: Outline, *, samples: bool) -> str:
    """A hash that is the same on ranks that save the same, with `samples` the same values as well."""
    rows: list[Any] = []
    every = max(1, len(outline.tensors) // _MAX_SAMPLED)
    for index, (path, value) in enumerate(zip(outline.paths, outline.tensors, strict=True)):
        mesh = mesh_of(value)  # its ranks have different parts of it
        sampled = samples and not mesh and index % every == 0 and not _is_of_each_rank(path)
        rows.append((_label_of(value), mesh, _sample(value) if sampled else ()))
    return hashlib.sha256(repr((outline.tree, rows)).encode()).hexdigest()


def union_of(run: Run, outline: Outline, digests: Sequence[str]) -> Union:
    """The union of what the ranks save. A collective if the digests of the ranks differ.

    Raises ValueError, the same on all ranks, where ranks have different things under one key.
    """
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    if len(first) == 1:
        return Union(outline.tree)
    pairs = zip(outline.paths, outline.tensors, strict=True)
    own = outline.filled(_Leaf.of(path, value) for path, value in pairs)
    trees: dict[int, Any] = {}
    for rank in sorted(first.values()):  # one of each kind, not those of a thousand ranks
        sent = [own]
        dist.broadcast_object_list(sent, rank, group=run.group)
        trees[rank] = sent[0]
    writers = {first[digests[rank]] for rank in run.writers}
    merge = _Merge(run, writers, len(trees))
    merge.found.tree = merge.merged(trees, ())
    return merge.found


def refuse_loss(left: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Raise UserError if no rank has taken a tensor that each of `left`, by entry, has left to others."""
    for entry in {entry for each in left for entry in each}:
        if lost := set.intersection(*(set(each[entry]) for each in left if entry in each)):
            raise UserError(
                f"{entry}: the checkpoint that the run resumes from also has {listed(sorted(lost), 4)}, "
                f"which none of {counted(len(left), 'rank')} has loaded: a save would lose it. Start as many "
                "ranks as have saved it, or name another folder."
            )


class _Leaf(NamedTuple):
    """A tensor of some ranks, without its values."""

    dtype: torch.dtype
    label: str  # its type, shape and placements
    mesh: tuple[int, ...]  # the ranks that share a DTensor; () for a plain one
    part: str  # which box of it the sample is of
    sample: tuple[float, ...]

    @classmethod
    def of(cls, path: Keys, value: Any) -> _Leaf:
        mesh = mesh_of(value)
        has_part = not mesh or value.device_mesh.get_coordinate() is not None
        part, offsets = own_part(value) if has_part else (value, ())
        sampled = has_part and not _is_of_each_rank(path)
        sample = _sample(part) if sampled else ()
        return cls(value.dtype, _label_of(value), mesh, f"{offsets}" if mesh else "", sample)


def _is_of_each_rank(path: Keys) -> bool:
    return str(path[-1]).rpartition(".")[2] in _OF_EACH_RANK  # in "module.bn1.running_mean" as well


def _label_of(value: Any) -> str:
    label = f"{value.dtype} {list(value.shape)}"
    return f"{label} as {value.placements}" if is_sharded(value) else label


def _sample(value: Tensor) -> tuple[float, ...]:
    """A few elements of a tensor, as numbers. Waits for a GPU."""
    flat = value.detach()
    if not flat.numel():
        return ()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = (flat if flat.is_contiguous() else flat[(0,) * (flat.ndim - 1)]).reshape(-1)
    flat = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
    flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # fp8, fp4
    return tuple(flat.double().tolist())


def _are_close(a: Sequence[float], b: Sequence[float]) -> bool:
    largest = max((abs(each) for each in (*a, *b) if abs(each) < float("inf")), default=0.0)
    near = _TOLERANCE * largest
    return all(
        x == y or abs(x - y) <= near or (x != x and y != y) for x, y in zip(a, b, strict=True)
    )


class _Merge:
    """The trees of several ranks become one."""

    def __init__(self, run: Run, writers: set[int], num_trees: int) -> None:
        self._run, self._writers, self._num_trees = run, writers, num_trees
        self.found = Union(None)

    def merged(self, found: Mapping[int, Any], path: Keys) -> Any:
        """The union of these, by rank. Raises ValueError."""
        # A rank that has nothing, such as the state of an optimizer on rank 0 alone, gives None.
        found = {rank: each for rank, each in found.items() if each is not None}
        if not found:
            return None
        first = min(found)
        value = found[first]
        for rank, other in found.items():
            if _label(other) != _label(value):
                self._refuse(path, {first: _label(value), rank: _label(other)})
        kind = type(value)
        if kind is _Leaf:
            return self._leaf(found, path)
        if kind in LISTS:
            rows = [{rank: each[row] for rank, each in found.items()} for row in range(len(value))]
            return kind(self.merged(each, (*path, row)) for row, each in enumerate(rows))
        if kind not in DICTS:
            return value
        having: dict[Any, dict[int, Any]] = defaultdict(dict)
        for rank, each in found.items():
            for key, own in each.items():
                having[key][rank] = own
        parts = {key: self.merged(each, (*path, key)) for key, each in having.items()}
        return as_kind_of(value, parts)

    def _leaf(self, found: Mapping[int, _Leaf], path: Keys) -> torch.dtype:
        first = min(found)
        leaf = found[first]
        for rank, other in found.items():
            has_same_part = leaf.part == other.part and (leaf.mesh != other.mesh or not leaf.mesh)
            if has_same_part and not _are_close(leaf.sample, other.sample):
                said = {first: f"values {leaf.sample[:2]}…", rank: f"{other.sample[:2]}…"}
                self._refuse(path, said)
        self.found.is_partial |= len(found) < self._num_trees
        if leaf.mesh or not self._writers <= found.keys():
            self.found.savers[path] = leaf.mesh or (first,)
        return leaf.dtype

    def _refuse(self, path: Keys, said: Mapping[int, str]) -> None:
        name = self._run.coordinator.name
        both = ", and ".join(f"{what[:80]} on {name(rank)}" for rank, what in said.items())
        raise ValueError(f"{shown_path(path)} differs: {both}. {_HINT}")


def _label(value: Any) -> str:
    """What has to be the same on all ranks."""
    kind = type(value)
    if kind in DICTS:
        return f"a {kind.__name__}"
    if kind in LISTS:
        return f"a {kind.__name__} of {len(value)}"
    return value.label if kind is _Leaf else repr(value)
