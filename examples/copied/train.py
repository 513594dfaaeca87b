"""A training of its own model, with order.py copied from mpiddp/train: each image once an epoch.

    mpiddp launch -n 2 examples/copied/train.py              # into runs/copied, or the folder that you name

Stop it with Ctrl-C, and start it again with another number of ranks: it continues with the next sample.
"""

import sys

import torch
import torch.distributed as dist
from order import Order
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp

EPOCHS, GLOBAL_BATCH = 3, 24


def main(folder: str = "runs/copied") -> int:
    with mpiddp.process_group() as world:
        with mpiddp.together():  # all ranks refuse, or none
            if world.world_size > GLOBAL_BATCH:
                raise mpiddp.UserError(f"{world.world_size} ranks need a batch of as many samples.")
        inputs = torch.randn(240, 32, generator=torch.Generator().manual_seed(0))
        targets = inputs.sum(1, keepdim=True)
        order = Order(len(inputs), GLOBAL_BATCH, 1, world.rank, world.world_size, seed=0)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        checkpoints = mpiddp.Checkpoints(folder, every=5)
        step = 0
        if saved := checkpoints.resume():
            saved.load_into(model=net, optimizer=optimizer)
            step = saved.step
        for epoch in range(step // order.steps_per_epoch, EPOCHS):
            for (numbers,) in order.steps(epoch, step % order.steps_per_epoch):
                errors = (model(inputs[numbers]) - targets[numbers]).square()
                loss = errors.sum() * world.world_size / GLOBAL_BATCH  # the mean over all ranks
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if checkpoints.due(step):
                    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    checkpoints.save(step, states)
                if mpiddp.should_stop():
                    return 75
            dist.all_reduce(loss.detach())
            if world.rank == 0:
                print(f"epoch {epoch}: step {step}, loss {loss.item() / world.world_size:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
