"""Which rank saves which part of each sharded tensor: torch's planner of distributed checkpoints decides.

Parts that several ranks have, under HSDP for example, are saved once, by the rank that has least to save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.saved import TensorGroup
from mpiddp.checkpoints.shards.index import Chunk, SavedTensor


@dataclass(frozen=True)
class ShardPlan:
    """What one rank saves, and where all parts of all tensors are."""

    own: tuple[str, ...]  # the names of the tensors of which this rank saves its part
    tensors: dict[str, SavedTensor]
    signature: object  # of the tensors that were planned


def plan_shards(
    sharded: Mapping[str, Tensor], group: TensorGroup | None, previous: ShardPlan | None
) -> ShardPlan:
    """Decide it for these tensors of this rank. A collective, unless `previous` is for such tensors.

    Args:
        group: None if the job has one rank.
    """
    signature = [_signature(name, tensor) for name, tensor in sharded.items()]
    if previous is not None and previous.signature == signature:
        return previous
    from torch.distributed.checkpoint import DefaultSavePlanner  # takes a while

    rank = dist.get_rank() if group else 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(sharded), is_coordinator=rank == 0)
    plans: list[Any] = [planner.create_local_plan()]
    if group is not None:
        own = plans[0]
        plans = [None] * dist.get_world_size()
        dist.all_gather_object(plans, own, group=group.group)
    # Every rank computes the same: a plan follows from nothing but the plans of the ranks.
    global_plans, metadata = planner.create_global_plan(plans)
    ranks = {
        (item.index.fqn, tuple(item.index.offset or ())): number
        for number, plan in enumerate(global_plans)
        for item in plan.items
    }
    tensors = {
        name: _saved_tensor(name, each, ranks)
        for name, each in metadata.state_dict_metadata.items()
    }
    return ShardPlan(_names(global_plans[rank]), tensors, signature)


def _signature(name: str, tensor: Any) -> tuple[Any, ...]:
    """What the plan depends on. It is the same on all ranks, which therefore plan together or not at all."""
    mesh = tensor.device_mesh
    return name, tensor.shape, tensor.dtype, tensor.placements, mesh.mesh.tolist()


def _names(plan: Any) -> tuple[str, ...]:
    return tuple(item.index.fqn for item in plan.items if _has_values(item.tensor_data))


def _has_values(data: Any) -> bool:
    """Some ranks have no part of a tensor that is shorter than the number of ranks."""
    return data is not None and 0 not in data.chunk.sizes


def _saved_tensor(
    name: str, saved: Any, ranks: Mapping[tuple[str, tuple[int, ...]], int]
) -> SavedTensor:
    chunks = tuple(
        Chunk(tuple(each.offsets), tuple(each.sizes), ranks[name, tuple(each.offsets)])
        for each in saved.chunks
        if 0 not in each.sizes
    )
    dtype = str(saved.properties.dtype).removeprefix("torch.")
    return SavedTensor(tuple(saved.size), dtype, chunks)
