"""Train a small regression with every kind of --grad-compression, and write the results into FILE.

mpirun -np 2 python -m tests.jobs.compressed FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import default_group
from mpiddp.train import parallel
from mpiddp.train.options import COMPRESSIONS
from tests.support.training import configured

STEPS = parallel.POWERSGD_FROM_STEP + 100


def main() -> None:
    found = {}
    with (
        join() as coordinator,
        default_group(coordinator, "gloo", torch.device("cpu"), timeout_s=60),
    ):
        torch.manual_seed(1 + coordinator.world.rank)
        inputs = torch.randn(32, 3, 8, 8)
        for kind in COMPRESSIONS:
            torch.manual_seed(0)
            layer = torch.nn.Linear(192, 64)
            model = torch.nn.Sequential(torch.nn.Flatten(), layer)
            ddp = parallel.wrap(model, configured(f"--grad-compression={kind}"), (3, 8, 8))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            targets = inputs.flatten(1)[:, :64]
            losses, first = [], torch.empty(0)
            for step in range(STEPS):
                loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
                loss.backward()
                if step == 0:
                    assert layer.weight.grad is not None
                    first = layer.weight.grad.clone()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
            weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
            everyone = [torch.empty_like(weights) for _ in range(coordinator.world.world_size)]
            dist.all_gather(everyone, weights)
            found[kind] = {
                "first_gradient": first.view(-1).tolist(),
                "losses": losses,
                "ranks_agree": all(torch.equal(each, weights) for each in everyone),
            }
        if coordinator.world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
