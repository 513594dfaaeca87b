"""The union of the states of all ranks. Ranks that have different values under one key are refused.

In each save, the ranks compare keys, types, shapes, numbers, and small tensors of integers. In the first two
saves and every tenth, they compare hashes of all other tensors, which takes one pass over the memory. If some
differ, a few are compared element by element, in each save others, because processors may round differently.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import state
from mpiddp.checkpoints.run_folder import Run
from mpiddp.checkpoints.state import FlatState, Keys, is_sharded, mesh_of, shown_path
from mpiddp.errors import UserError
from mpiddp.runtime.rank_log import log
from mpiddp.runtime.torch.divergence import digests_of
from mpiddp.text import counted, listed

_SMALL = 1 << 16  # a tensor of so many integers, or fewer, is compared in each save
_SHOWN = 4  # a sentence shows the values of a tensor of so many integers, or fewer
_LONGEST = 80  # characters of a rank's value in a sentence
_SENT = 4  # tensors that are sent, and compared element by element
# Each rank has its own statistics of BatchNorm in DDP. The statistics of the lowest rank are saved.
_OF_EACH_RANK = ("running_mean", "running_var", "num_batches_tracked")
_HINT = "Save what differs under keys of its own, as in {f'optimizer{stage}': …}, or in per_rank."


@dataclass
class Union:
    """The union of the states that the ranks save.

    Attributes:
        tree: the state with a type in the place of each tensor.
        savers: by path, the ranks that save a tensor: for a DTensor the ranks of its mesh; for a plain tensor
            that some writers lack, the lowest rank that has it. {} if all ranks have the same tensors.
        partial: the paths that only some ranks have. All that is below them is partial, too.
    """

    tree: Any
    savers: dict[Keys, tuple[int, ...]] = field(default_factory=dict)
    partial: list[Keys] = field(default_factory=list)


def is_of_each_rank(path: Keys) -> bool:
    return str(path[-1]).rpartition(".")[2] in _OF_EACH_RANK  # in "module.bn1.running_mean" as well


def digest_of(flat: FlatState) -> str:
    """A hash of the keys, types, shapes and numbers of a state."""
    rows = [_Leaf.of(path, value) for path, value in flat.tensors.items()]
    return hashlib.sha256(repr((flat.tree, rows)).encode()).hexdigest()


def union_of(run: Run, flat: FlatState, digests: Sequence[str]) -> Union:
    """The union of the states that the ranks save. A collective if their digests differ.

    Raises ValueError, the same on all ranks, if ranks have different values under one key.
    """
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    if len(first) == 1:
        return Union(flat.tree)
    tree = flat.with_tensors(_Leaf.of(path, value) for path, value in flat.tensors.items())
    trees: dict[int, Any] = {}
    for rank in sorted(first.values()):  # equal trees of a thousand ranks are sent once
        sent = [tree]
        dist.broadcast_object_list(sent, rank, group=run.group)
        trees[rank] = sent[0]
    writers = {first[digests[rank]] for rank in run.writers}
    union = Union(None)

    def merged(by_rank: Mapping[int, Any], path: Keys, *, is_partial: bool = False) -> Any:
        """The union of what the ranks have at this path of their trees."""
        # A rank may have None, for example if rank 0 alone has gathered the state of an optimizer.
        by_rank = {rank: tree for rank, tree in by_rank.items() if tree is not None}
        if not by_rank:
            return None
        if len(by_rank) < len(trees) and not is_partial:
            union.partial.append(path)
            is_partial = True
        lowest = min(by_rank)
        value = by_rank[lowest]
        for rank, other in by_rank.items():
            if _kind_of(other) != _kind_of(value):
                kinds = {lowest: _kind_of(value)[:_LONGEST], rank: _kind_of(other)[:_LONGEST]}
                name_of = run.coordinator.name
                both = ", and ".join(f"{value} on {name_of(rank)}" for rank, value in kinds.items())
                raise ValueError(f"{shown_path(path)} differs: {both}. {_HINT}")
        kind = type(value)
        if kind is _Leaf:
            if value.mesh or not writers <= by_rank.keys():
                union.savers[path] = value.mesh or (lowest,)
            return value.dtype
        if kind not in state.DICTS and kind not in state.LISTS:
            return value
        by_key: dict[Any, dict[int, Any]] = defaultdict(dict)
        for rank, tree in by_rank.items():
            for key, entry in tree.items() if kind in state.DICTS else enumerate(tree):
                by_key[key][rank] = entry
        items = {
            key: merged(of_key, (*path, key), is_partial=is_partial)
            for key, of_key in by_key.items()
        }
        return state.as_kind_of(value, items) if kind in state.DICTS else kind(items.values())

    union.tree = merged(trees, ())
    return union


def require_every_tensor_loaded(unloaded: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Raise UserError if no rank has loaded a tensor. `unloaded`: of each rank, by entry: [world_size]."""
    for entry in {entry for of_rank in unloaded for entry in of_rank}:
        by_rank = [set(of_rank[entry]) for of_rank in unloaded if entry in of_rank]
        if lost := set.intersection(*by_rank):
            raise UserError(
                f"{entry}: a save would lose {listed(sorted(lost), 4)} of the checkpoint that the run resumes from, "
                f"which none of {counted(len(unloaded), 'rank')} has loaded.",
                fix="start as many ranks as have saved it, or name another folder",
            )


class _Leaf(NamedTuple):
    """The properties of a tensor that travel to the other ranks, in its place."""

    dtype: torch.dtype
    label: str  # has to be the same on all ranks
    mesh: tuple[int, ...]  # the ranks that share a DTensor; () for a plain one

    @classmethod
    def of(cls, path: Keys, value: Any) -> _Leaf:
        return cls(value.dtype, _label_of(path, value), mesh_of(value))


def _label_of(path: Keys, value: Any) -> str:
    """Type, shape and placements. For a tensor of integers, unless it is large, also their values."""
    label = f"{value.dtype} {list(value.shape)}"
    if is_sharded(value):
        return f"{label} as {value.placements}"
    is_compared = value.numel() <= _SMALL and not is_of_each_rank(path)
    if not is_compared or value.is_floating_point() or value.is_complex():
        return label
    numbers = value.detach().cpu()
    if value.numel() <= _SHOWN:
        return f"{label} of {numbers.tolist()}"
    return f"{label} of CRC {crc32(numbers.contiguous().view(torch.uint8).numpy()):08x}"


def _kind_of(value: Any) -> str:
    """A text that has to be the same on all ranks that have the value."""
    kind = type(value)
    if kind in state.DICTS:
        return f"a {kind.__name__}"
    if kind in state.LISTS:
        return f"a {kind.__name__} of {len(value)}"
    return value.label if kind is _Leaf else repr(value)


# The values of tensors


def _shared_parts(run: Run, flat: FlatState) -> dict[str, Tensor]:
    """The tensors of this rank, or its parts of DTensors, that other ranks may have, by a common name."""
    parts = {}
    for path, value in flat.tensors.items():
        mesh = mesh_of(value)
        is_elsewhere = mesh and value.device_mesh.get_coordinate() is None  # type: ignore[attr-defined]
        if is_of_each_rank(path) or is_elsewhere or len(mesh) == run.world_size:
            continue
        part, offsets = state.own_part(value)
        if part.numel():
            parts[shown_path(path) + (f" at {list(offsets)}" if mesh else "")] = part
    return parts


def digest_of_values(run: Run, flat: FlatState) -> str:
    """A hash of the bits of all tensors that other ranks may have."""
    hashes = digests_of(_shared_parts(run, flat))
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def compare_values(run: Run, flat: FlatState) -> None:
    """Compare the tensors whose hashes differ between ranks. A collective: every rank must call it.

    Rank 0 finds them. Of a few, the lowest rank sends its own to the first with another one, which compares them.

    Raises ValueError, the same on all ranks, if one differs by more than rounding.
    """
    parts = _shared_parts(run, flat)
    exact = {n for n, part in parts.items() if not (part.is_floating_point() or part.is_complex())}
    by_rank: list[Any] = [None] * run.world_size
    told = digests_of(parts), exact
    dist.gather_object(told, by_rank if run.rank == 0 else None, 0, group=run.group)
    sent: list[Any] = [_odd_ones(by_rank, run.num_saves) if run.rank == 0 else None]
    dist.broadcast_object_list(sent, 0, group=run.group)
    answers: list[list[Any]] = []
    for number, (name, lowest, others) in enumerate(sent[0][:_SENT]):
        if run.rank == lowest:
            copy = parts[name].to("cpu", copy=True)  # the pickle of a view has all of its storage
            dist.send_object_list([copy], others[0], run.group)
        elif run.rank == others[0]:
            received: list[Any] = [None]
            dist.recv_object_list(received, lowest, run.group)
            answers.append([number, *_difference(received[0], parts[name].cpu())])
    name_of = run.coordinator.name
    for number, is_rounding, where in sorted(row for rows in run.gather(answers) for row in rows):
        name, lowest, others = sent[0][number]
        sentence = where.format(name_of(lowest), listed([name_of(rank) for rank in others], 2))
        if not is_rounding:
            raise ValueError(f"{name} differs: {sentence}. {_HINT}")
        if run.rank == 0 and number == 0:
            log.warning(
                f"warning: {counted(len(sent[0]), 'tensor')} of the ranks differ by rounding, such as "
                f"{name}: {sentence}. Those of the lowest rank are saved."
            )


def _odd_ones(
    by_rank: Sequence[tuple[Mapping[str, int], set[str]]], turn: int
) -> list[tuple[str, int, list[int]]]:
    """The tensors that differ, the lowest rank that has each, and the ranks that have another one.

    If some of the tensors are never rounded, these alone. Otherwise, each turn begins with others.
    """
    rows: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, (hashes, _) in enumerate(by_rank):
        for name, hashed in hashes.items():
            rows[name][rank] = hashed
    odd = []
    for name, of_rank in rows.items():
        lowest = min(of_rank)
        if others := [rank for rank, hashed in of_rank.items() if hashed != of_rank[lowest]]:
            odd.append((name, lowest, others))
    exact, start = set.union(*(names for _, names in by_rank)), turn * _SENT % max(len(odd), 1)
    return [row for row in odd if row[0] in exact] or odd[start:] + odd[:start]


def _difference(first: Tensor, value: Tensor) -> tuple[bool, str]:
    """Whether two tensors differ by rounding only; and where they differ most, with gaps for two ranks.

    Rounding adds up over steps, as a random walk does, so more than the last bit of the largest element may
    differ, but less than the root of its precision.
    """
    if value.is_complex():
        first, value = (torch.view_as_real(tensor.resolve_conj()) for tensor in (first, value))
    first, value = first.reshape(-1), value.reshape(-1)
    sizes, most = (first != value).double(), 0.0
    if value.is_floating_point():
        a, b = first.double(), value.double()
        sizes = (a - b).abs().nan_to_num(nan=math.inf)
        sizes[(a == b) | (a.isnan() & b.isnan())] = 0
        most = torch.finfo(value.dtype).eps ** (2 / 3) * a.nan_to_num(0, 0, 0).abs().max().item()
    index = int(sizes.argmax())
    x, y = first[index].item(), value[index].item()
    where = f"element {index} is {x} on {{}}, and {y} on {{}}, a difference of {abs(y - x):.2g}"
    return sizes[index].item() <= most, where
