"""An env:// script as people write it for torchrun: all_reduces.py BACKEND [STEPS | variable].

Rank 0 prints when the first all-reduce has ended. With STEPS it is a small training: after so many of them,
rank 0 prints the time, and the last rank kills itself. The next attempt prints when its first step has ended.
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
is_again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if rank == 0 and not is_again:
    print(f"first all-reduce of {total:g} ranks at {time.time()}", flush=True)
if training:
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 if is_again else int(training[0])):
        model(torch.ones(8, device=device)).sum().backward()
        optimizer.step()
        time.sleep(0 if is_again else 0.02)
    if rank == 0 and is_again:
        print(f"first step of {total:g} ranks at {time.time()}", flush=True)
    dist.barrier()
    if rank == 0 and not is_again:
        print(f"killed at {time.time()}", flush=True)
    if rank == last and not is_again:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # with a rank that is gone
dist.destroy_process_group()
