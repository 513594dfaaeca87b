"""Three process groups one after another, the second of which ends with an error that is caught."""

from __future__ import annotations

import torch
import torch.distributed as dist

import mpiddp

for turn in range(3):
    try:
        with mpiddp.process_group(backend="gloo") as world:
            total = torch.ones(1) * turn
            dist.all_reduce(total)
            if turn == 1:
                raise RuntimeError("on all ranks")
    except RuntimeError as error:
        print(error, flush=True)
    assert not dist.is_initialized()
    print(
        f"rank {world.rank} of {world.world_size} on {world.device} has {total.item():g}",
        flush=True,
    )
