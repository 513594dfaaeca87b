"""Two NCCL ranks on one GPU. NCCL refuses them as duplicates, unless it takes them for two hosts.

    mpirun -np 2 python -m tests.jobs.two_on_one_gpu

Prints rank 0's sum after an all-reduce and a DDP step, or NCCL's error.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpiddp.runtime.join import join
from mpiddp.runtime.process_group import default_group


def main() -> None:
    device = torch.device("cuda", 0)
    with join() as coordinator:
        os.environ["NCCL_HOSTID"] = f"host{coordinator.world.rank}"
        try:
            with default_group(coordinator, "nccl", device, timeout_s=60):
                values = torch.full((4,), float(coordinator.world.rank + 1), device=device)
                dist.all_reduce(values)
                model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
                model(values).sum().backward()
                answer = f"the sum is {values[0].item():g}, and DDP has averaged its gradients"
        except RuntimeError as error:  # torch.distributed.DistBackendError is one
            answer = f"NCCL refuses: {str(error).splitlines()[-1]}"
        if coordinator.world.rank == 0:
            print(answer, flush=True)


if __name__ == "__main__":
    main()
