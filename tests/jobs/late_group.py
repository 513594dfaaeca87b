"""An env:// script uses the job's store. Ranks 1 and 2 create a group in it after rank 0 has finished."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mpiddp.runtime.join import join

with join() as coordinator:
    rank = coordinator.world.rank
    dist.init_process_group("gloo")  # env://, like in any script
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank > 0:
        time.sleep(1)
        late = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(total, group=late)
        print(f"rank {rank} has {total.item():g}", flush=True)
    dist.destroy_process_group()
