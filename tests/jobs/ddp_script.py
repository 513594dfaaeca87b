"""A DDP script like those of tutorials, without mpiddp. It prints a digest of its weights."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    digest = sum(p.double().sum().item() for p in model.parameters())
    # Write the line at once, because torchrun's workers share one pipe.
    sys.stdout.write(f"rank {rank} of {dist.get_world_size()} local {local_rank}: {digest!r}\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    # Wait for gloo's thread, which is still cleaning up. mpiddp would wait for it; otherwise torch 2.13
    # aborts about 3 of 10 interpreters at their end.
    time.sleep(3)


if __name__ == "__main__":
    main()
