"""An env:// script as people write it for torchrun: one all-reduce over gloo or nccl, and its time."""

import os
import sys
import time

import torch
import torch.distributed as dist

backend = sys.argv[1]
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group(backend)
one = torch.ones(1, device=device)
dist.all_reduce(one)
total = one.item()
if dist.get_rank() == 0:
    print(f"{total:g} ranks at {time.time()}", flush=True)
dist.destroy_process_group()
