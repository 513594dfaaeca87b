"""An env:// script as people write it for torchrun: all_reduces.py BACKEND [STEPS | variable].

Rank 0 prints when the first all-reduce has ended. With STEPS the first attempt is a small training: after so
many of them rank 0 prints the time, and the last rank kills itself.
"""

import os
import signal
import sys
import time

if sys.argv[2:] == ["variable"]:  # as many scripts do, before torch reads them
    os.environ[sys.argv.pop()] = "1"

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend, *training = sys.argv[1:]
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group(backend)
rank, last = dist.get_rank(), dist.get_world_size() - 1
one = torch.ones(1, device=device)
dist.all_reduce(one)
total = one.item()
if rank == 0:
    print(f"first all-reduce of {total:g} ranks at {time.time()}", flush=True)
if training and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(int(training[0])):
        model(torch.ones(8, device=device)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
    dist.barrier()
    if rank == 0:
        print(f"killed at {time.time()}", flush=True)
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # with a rank that is gone
dist.destroy_process_group()
