"""An env:// script as people write it for torchrun. In its first attempt, the last rank kills itself.

Rank 0 prints when the last step before the kill has ended, and when the first collective after it has.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 200

is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
backend = sys.argv[1]
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group(backend)
rank, last = dist.get_rank(), dist.get_world_size() - 1
if not is_first:
    dist.all_reduce(torch.ones(1, device=device))
    if rank == 0:
        print(f"again at {time.time()}", flush=True)
model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    model(torch.ones(8, device=device)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if is_first and step == STEPS - 1:
        dist.barrier()
        if rank == 0:
            print(f"killed at {time.time()}", flush=True)
        if rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # with a rank that is gone
dist.destroy_process_group()
