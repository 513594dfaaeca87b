"""A small network on dp × tp ranks: tensor parallelism inside a host, FSDP over the rest.

    mpiddp launch -n 4 examples/hybrid.py --tp 2
    torchrun --nproc-per-node 4 examples/hybrid.py --tp 2
    python examples/hybrid.py

All three print the same losses: a step adds up the same numbers, in another order.
"""

import argparse
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mpiddp

STEPS, BATCH = 40, 48


def network() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    layers = {"up": nn.Linear(32, 128), "act": nn.GELU(), "down": nn.Linear(128, 1)}
    return nn.Sequential(OrderedDict(layers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    options = parser.parse_args()

    world = mpiddp.init()
    mesh = mpiddp.mesh(tp=options.tp)  # dp takes the ranks that tp leaves
    dp, tp = mesh["dp"], mesh["tp"]

    model = network().to(world.device)
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        batch = torch.randn(BATCH, 32, generator=generator)  # the global batch, on every rank
        inputs = batch.chunk(dp.size())[dp.get_local_rank()].to(
            world.device
        )  # one part per replica
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dp.size()
        dist.all_reduce(mean, group=dp.get_group())
        if step % 10 == 0 and world.rank == 0:
            print(f"step {step}: loss {mean.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
