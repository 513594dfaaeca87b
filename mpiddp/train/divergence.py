"""End a training whose ranks no longer hold the same bits, before they save."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpiddp.checkpoints.script import Checkpoints
from mpiddp.errors import JobFailed
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.runtime.torch.divergence import find_divergence
from mpiddp.train.checkpoint import exiting_together
from mpiddp.train.config import TrainConfig
from mpiddp.train.copies import Copies
from mpiddp.train.engine import TrainState
from mpiddp.train.parallel import is_sharded


def refuse_divergence(
    state: TrainState, step: int, checkpoints: Checkpoints, coordinator: Coordinator
) -> None:
    """Exit on all ranks unless all copies of the model have the same bits. All ranks must call this.

    This check precedes every save, so a restart resumes from bits in which all ranks agreed.

    Raises:
        SystemExit: with code 1. Rank 0 has printed the error, and the save in flight is complete.
    """
    has_shards = is_sharded(state.model)
    group = _ranks_with_same_shards(state.model) if has_shards else None
    if has_shards and group is None:
        return
    sentence = find_divergence(state.model, state.optimizer, step=step, group=group)
    found = torch.tensor(int(bool(sentence)), device=next(state.model.parameters()).device)
    if has_shards:  # the ranks with other shards do not know
        dist.all_reduce(found, dist.ReduceOp.MAX)
    if not found:
        return
    with exiting_together(coordinator):
        checkpoints.close()
    with coordinator.all_or_none():
        if sentence:
            raise JobFailed(
                f"{sentence} This state is not saved; a restart resumes from the newest checkpoint."
            )


def warn_of_one_copy(config: TrainConfig, copies: Copies) -> None:
    """Say that the check has nothing to compare. No error: a lost host may have left one of two."""
    if config.check_divergence and len(copies) == 1:
        log.warning(
            "warning: --check-divergence has nothing to compare: the ranks are on one host, and share "
            "one copy of the model."
        )


def _ranks_with_same_shards(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks of all copies that hold the shards of this rank; None if there is one copy."""
    parameter: Any = next(model.parameters())
    mesh = parameter.device_mesh
    return mesh.get_group("replicate") if "replicate" in mesh.mesh_dim_names else None
