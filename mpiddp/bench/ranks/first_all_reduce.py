"""An env:// script as people write it for torchrun: one all-reduce, and when it was done."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 0:
    print(f"{one.item():g} ranks at {time.time()}", flush=True)
dist.destroy_process_group()
