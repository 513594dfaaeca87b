"""The union of the states of all ranks. Ranks that have different values under one key are refused.

In each save, the ranks compare keys, types, shapes, numbers, and small tensors of integers. In the first two
saves and every tenth, they compare hashes of all other tensors, which takes one pass over the memory. Tensors
whose hashes differ are saved if they differ in the last bits only.
"""

from __future__ import annotations

import hashlib
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
from mpiddp.text import counted, listed

_SMALL = 1 << 16  # a tensor of so many integers, or fewer, is compared in each save
_SHOWN = 4  # a sentence shows the values of a tensor of so many integers, or fewer
_LONGEST = 80  # characters of a rank's value in a sentence
_TOLERANCE = 1e-3  # of the largest element, because processors and kernels round differently
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
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
        has_stages: some ranks have tensors that others do not.
    """

    tree: Any
    savers: dict[Keys, tuple[int, ...]] = field(default_factory=dict)
    has_stages: bool = False


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

    def merged(by_rank: Mapping[int, Any], path: Keys) -> Any:
        """The union of what the ranks have at this path of their trees."""
        # A rank may have None, for example if rank 0 alone has gathered the state of an optimizer.
        by_rank = {rank: tree for rank, tree in by_rank.items() if tree is not None}
        if not by_rank:
            return None
        lowest = min(by_rank)
        value = by_rank[lowest]
        for rank, other in by_rank.items():
            if _kind_of(other) != _kind_of(value):
                kinds = {lowest: _kind_of(value)[:_LONGEST], rank: _kind_of(other)[:_LONGEST]}
                _refuse(run, shown_path(path), kinds)
        kind = type(value)
        if kind is _Leaf:
            union.has_stages |= len(by_rank) < len(trees)
            if value.mesh or not writers <= by_rank.keys():
                union.savers[path] = value.mesh or (lowest,)
            return value.dtype
        if kind not in state.DICTS and kind not in state.LISTS:
            return value
        by_key: dict[Any, dict[int, Any]] = defaultdict(dict)
        for rank, tree in by_rank.items():
            for key, entry in tree.items() if kind in state.DICTS else enumerate(tree):
                by_key[key][rank] = entry
        items = {key: merged(of_key, (*path, key)) for key, of_key in by_key.items()}
        return state.as_kind_of(value, items) if kind in state.DICTS else kind(items.values())

    union.tree = merged(trees, ())
    return union


def require_every_tensor_loaded(unloaded: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Raise UserError if no rank has loaded a tensor. `unloaded`: of each rank, by entry: [world_size]."""
    for entry in {entry for of_rank in unloaded for entry in of_rank}:
        by_rank = [set(of_rank[entry]) for of_rank in unloaded if entry in of_rank]
        if lost := set.intersection(*by_rank):
            raise UserError(
                f"{entry}: the checkpoint that the run resumes from also has {listed(sorted(lost), 4)}, "
                f"which none of {counted(len(unloaded), 'rank')} has loaded: a save would lose it. Start as "
                "many ranks as have saved it, or name another folder."
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


def _refuse(run: Run, name: str, values: Mapping[int, str]) -> None:
    name_of = run.coordinator.name
    both = ", and ".join(f"{value} on {name_of(rank)}" for rank, value in values.items())
    raise ValueError(f"{name} differs: {both}. {_HINT}")


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


def _hashes_of(parts: Mapping[str, Tensor]) -> dict[str, int]:
    """A hash of each tensor. This waits once for each GPU, and not once for each tensor."""
    sums: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, part in parts.items():
        sums[part.device][name] = _hash(part)
    hashes: dict[str, int] = {}
    for by_name in sums.values():
        hashes |= dict(zip(by_name, torch.stack([*by_name.values()]).tolist(), strict=True))
    return hashes


def _hash(value: Tensor) -> Tensor:
    """A sum of the bits of all elements, in which each row has a weight of its own."""
    plain = value.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    bits = plain.view(_INTEGERS[plain.element_size()])
    rows = (bits.sum(-1, dtype=torch.int64) if bits.ndim else bits.long()).reshape(-1)
    weights = torch.arange(1, len(rows) + 1, device=rows.device)
    return (rows * weights).sum()


def digest_of_values(run: Run, flat: FlatState) -> str:
    """A hash of the bits of all tensors that other ranks may have."""
    hashes = _hashes_of(_shared_parts(run, flat))
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def compare_values(run: Run, flat: FlatState) -> None:
    """Compare the tensors whose hashes differ between ranks. A collective: every rank must call it.

    Raises ValueError, the same on all ranks, if one differs by more than the last bits.
    """
    parts = _shared_parts(run, flat)
    by_rank: list[Any] = [None] * run.world_size
    dist.all_gather_object(by_rank, _hashes_of(parts), group=run.group)
    rounded: list[str] = []
    for name in dict.fromkeys(name for hashes in by_rank for name in hashes):
        ranks = [rank for rank, hashes in enumerate(by_rank) if name in hashes]
        if len({by_rank[rank][name] for rank in ranks}) == 1:
            continue
        part, problem = parts.get(name), None
        sent = [part.cpu() if part is not None and run.rank == ranks[0] else None]
        dist.broadcast_object_list(sent, ranks[0], group=run.group)
        if sent[0] is not None and part is not None:
            problem = _difference(sent[0], part.cpu())
        for rank, answer in enumerate(run.gather(problem)):
            if answer is not None:
                _refuse(run, name, {ranks[0]: answer[0], rank: answer[1]})
        rounded.append(name)
    if rounded and run.rank == 0:
        log.warning(
            f"warning: {listed(rounded, 2)}: the ranks differ in the last bits. Those of the lowest rank are "
            "saved."
        )


def _difference(first: Tensor, value: Tensor) -> list[str] | None:
    """Where two tensors of one shape differ by more than rounding, and both values there; or None."""
    first, value = (torch.view_as_real(t) if t.is_complex() else t for t in (first, value))
    is_exact = not value.is_floating_point()
    a, b = (t.reshape(-1).to(torch.int64 if is_exact else torch.float64) for t in (first, value))
    finite = a[a.isfinite()].abs()
    most = 0 if is_exact or not finite.numel() else _TOLERANCE * finite.max().item()
    differs = ~torch.isclose(a, b, rtol=0, atol=most, equal_nan=not is_exact)
    if not differs.any():
        return None
    index = int(differs.int().argmax())
    return [f"element {index} is {a[index].item()}", f"{b[index].item()}"]
