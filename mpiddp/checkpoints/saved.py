"""The contents of a checkpoint in memory, and how one rank that has read it sends it to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

Common = TypeVar("Common")
RankState = dict[str, Any]


@dataclass(frozen=True)
class TensorGroup:
    """The process group that carries checkpoints between ranks, and the device of its tensors.

    The group None is the default group.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Saved(Generic[Common]):
    """The contents of a checkpoint, tensors on the CPU."""

    common: Common  # the same for all ranks
    ranks: Sequence[RankState]  # [world_size of the job that saved it]
    # Whether `common` has None in the places of tensors that lie in files of shards.
    is_sharded: bool = False


@dataclass(frozen=True)
class Received(Generic[Common]):
    """The part of a checkpoint that one rank gets."""

    common: Common
    own: RankState | None  # what this rank saved; None if the job that saved had no such rank
    world_size: int  # of the job that saved it


def broadcast(
    saved: Saved[Common] | None, holder: int, group: TensorGroup | None
) -> Received[Common] | None:
    """Send the checkpoint of rank `holder` to every rank; None if there is none. All ranks must call this.

    Args:
        saved: None on every rank but the holder.
        group: None if the job has one rank.
    """
    if group is None:
        return Received(saved.common, _first(saved.ranks), len(saved.ranks)) if saved else None
    box: list[Any] = [(saved.common, len(saved.ranks)) if saved else None]
    dist.broadcast_object_list(box, holder, group=group.group)
    if box[0] is None:
        return None
    common, saved_ranks = box[0]
    world_size = dist.get_world_size()
    states: list[RankState | None] = [None] * world_size
    if saved is not None:
        states = [*saved.ranks, *states][:world_size]
    own: list[RankState | None] = [None]
    dist.scatter_object_list(own, states if saved else None, holder, group=group.group)
    return Received(common, own[0], saved_ranks)


def _first(ranks: Sequence[RankState]) -> RankState | None:
    return ranks[0] if ranks else None
