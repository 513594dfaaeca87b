"""The ranks that share a copy of the model.

--parallel ddp     a copy on every rank
--parallel fsdp    one copy, over all ranks
--parallel hsdp    a copy on every host, over the ranks of the host
"""

from __future__ import annotations

from collections import Counter

from mpiddp.errors import UserError
from mpiddp.runtime.job.coordinator import AGREE_TIMEOUT_S, Coordinator
from mpiddp.text import all_of
from mpiddp.train.config import TrainConfig

# The ranks that hold each copy of the model, [copies][ranks of a copy].
Copies = list[list[int]]


def find_copies(config: TrainConfig, coordinator: Coordinator) -> Copies:
    """The ranks that share each copy of the model. All ranks must call this.

    Returns:
        [] under DDP, where every rank has a copy.

    Raises:
        UserError: hsdp on hosts with different numbers of ranks.
    """
    ranks = list(range(coordinator.world.world_size))
    if config.parallel == "ddp":
        return []
    if config.parallel == "fsdp":
        return [ranks]
    nodes = coordinator.all_gather_json(coordinator.world.node_rank, timeout_s=AGREE_TIMEOUT_S)
    copies = [[rank for rank in ranks if nodes[rank] == node] for node in dict.fromkeys(nodes)]
    if len({len(copy) for copy in copies}) > 1:
        counts = Counter(coordinator.hostnames)
        found = all_of([f"{count} on {name}" for name, count in counts.items()])
        raise UserError(
            "--parallel hsdp shards the model within a host, so every host needs the same number of "
            f"ranks; found {found}. Give the hosts equal slots, or use --parallel fsdp."
        )
    return copies
