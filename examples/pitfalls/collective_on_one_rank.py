"""A collective under `if rank == 0` waits for the other ranks, which never call it.

mpiddp launch -n 2 --hang-timeout 10s examples/pitfalls/collective_on_one_rank.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp


def main() -> None:
    with mpiddp.process_group() as world:
        device = torch.device(world.device)
        model = DistributedDataParallel(nn.Linear(8, 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        metrics = dist.new_group(backend="gloo")  # for values on the CPU, beside the gradients
        for step in range(1, 1001):
            loss = model(torch.randn(16, 8, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if world.rank == 0 and step % 10 == 0:
                mean_loss = loss.detach().cpu() / world.world_size
                dist.all_reduce(mean_loss, group=metrics)  # the mistake: only rank 0 calls it
                print(f"step {step}: loss {mean_loss.item():.4f}", flush=True)
            if mpiddp.should_stop():
                return


if __name__ == "__main__":
    main()
