"""An env:// script's group on the job's one store; ranks 1 and 2 need it when rank 0 is long done."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mpiddp.runtime.join import join

with join() as coordinator:
    rank = coordinator.world.rank
    dist.init_process_group("gloo")  # env://, as any script would
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank > 0:
        time.sleep(1)
        late = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(total, group=late)
        print(f"rank {rank} has {total.item():g}", flush=True)
    dist.destroy_process_group()
