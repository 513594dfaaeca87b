"""What all sharded saves of a run share: the plan, the file systems, the connections of the saving thread."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.file_systems import FileSystems
from mpiddp.checkpoints.saved import TensorGroup
from mpiddp.checkpoints.shards.exchange import Exchange
from mpiddp.checkpoints.shards.index import SavedTensor
from mpiddp.checkpoints.shards.plan import ShardPlan, plan_shards
from mpiddp.checkpoints.shards.write import ShardSave
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log


class ShardSaver:
    """What the sharded saves of one rank have in common."""

    def __init__(
        self,
        root: Path,
        file_systems: FileSystems,
        coordinator: Coordinator,
        group: TensorGroup | None,
        *,
        timeout_s: float,
    ) -> None:
        """A collective: every rank must create one.

        Args:
            root: the folder of checkpoints.
            file_systems: the file systems that the ranks see there.
            group: of all ranks; None if the job has one.
            timeout_s: how long a save waits for a rank that does not answer.
        """
        self._root = root
        self._coordinator = coordinator
        self._group = group
        self._timeout_s = timeout_s
        self._plan: ShardPlan | None = None
        self._prefix = coordinator.unique_prefix("shards")
        self._values = coordinator.values.clone()
        self._previous: Exchange | None = None
        self._file_systems = file_systems
        self._copies: Any = None  # the process group of the copies
        if len(file_systems.writers) > 1:
            timeout = timedelta(seconds=timeout_s)
            self._copies = dist.new_group(backend="gloo", timeout=timeout)
        elif (coordinator.world.num_nodes or 1) == 1:
            log.info(
                "sharded checkpoints: one host holds every shard once. The shards of several hosts "
                "without a shared file system lie on two hosts each."
            )

    def plan(
        self, sharded: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, SavedTensor]]:
        """This rank's parts of the tensors that it saves, and where all parts are. A collective."""
        self._plan = plan_shards(sharded, self._group, self._plan)
        with torch.no_grad():
            own = {name: _local(sharded[name]) for name in self._plan.own}
        return own, self._plan.tensors

    def begin(self, step: int, save: int) -> ShardSave:
        """The save of a step, in the thread. `save` is its number, the same on every rank."""
        if self._previous is not None:  # all ranks have finished it
            self._previous.forget()
        exchange = Exchange(
            self._values, self._coordinator, f"{self._prefix}/{save}", self._timeout_s
        )
        self._previous = exchange
        rank = self._coordinator.world.rank
        return ShardSave(self._root, step, rank, self._file_systems, exchange, self._copies)


def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local()
    return part.contiguous()
