"""`mpiddp.init()`: the group is there without a `with`, and until the interpreter ends."""

from __future__ import annotations

import atexit

import torch
import torch.distributed as dist

import mpiddp

atexit.register(lambda: print("destroyed" if not dist.is_initialized() else "left behind"))
world = mpiddp.init()
total = torch.ones(1)
dist.all_reduce(total)
print(f"{world.backend} over {dist.get_world_size()} ranks has {total.item():g}", flush=True)
