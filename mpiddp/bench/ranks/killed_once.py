"""An env:// script as people write it for torchrun. In its first attempt, the last rank kills itself.

Rank 0 prints when the last collective before the kill has ended, and when the first one after it has.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

STEPS = 10

is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
backend = sys.argv[1]
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group(backend)
rank, last = dist.get_rank(), dist.get_world_size() - 1
for step in range(STEPS + is_first):  # the first time, the others wait for a rank that is gone
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    one.item()
    if rank == 0 and step == (STEPS - 1 if is_first else 0):
        print(f"{'killed' if is_first else 'again'} at {time.time()}", flush=True)
    if is_first and rank == last and step == STEPS - 1:
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
