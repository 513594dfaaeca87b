"""An env:// script as people write it for torchrun: one all-reduce on its device, and its time."""

import os
import time

import torch
import torch.distributed as dist

device, backend = torch.device("cpu"), "gloo"
if torch.cuda.is_available():
    device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
    torch.cuda.set_device(device)
dist.init_process_group(backend)
one = torch.ones(1, device=device)
dist.all_reduce(one)
total = one.item()
if dist.get_rank() == 0:
    print(f"{total:g} ranks at {time.time()}", flush=True)
dist.destroy_process_group()
