"""Step 4: fully sharded (FSDP2), for a model that is too large for one device.

mpiddp launch --hostfile hostfiles/two_nodes --max-restarts 3 examples/series/sharded.py 10 2
torchrun --nproc-per-node 2 examples/series/sharded.py 10 2
"""

import task
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import mpiddp


def main() -> None:
    # A launcher has started the ranks, and its variables say which rank this is, and where the others
    # are. init() reads them, forms the process group and chooses the device.
    world = mpiddp.init()
    rank, ranks, device = world.rank, world.world_size, torch.device(world.device)
    options = task.parse()
    task.check(options, ranks)
    # Each rank keeps a part of every tensor. A layer is gathered only while it computes, and backward()
    # leaves each rank its part of the averaged gradients. The optimizer comes after, for the parts.
    mesh = init_device_mesh(device.type, (ranks,))
    model = task.make_model().to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = task.make_data(options.samples)
    # Each rank gets its share of the samples, and of each step: together they are step 1's.
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size // ranks, sampler=sampler)
    # Every host needs the checkpoint, and a host may fail while it saves. A run with other settings is
    # another run.
    config = {"series": "fsdp", "batch_size": options.batch_size, "samples": options.samples}
    checkpoints = mpiddp.Checkpoints(options.out, every=options.save_every, config=config)
    if saved := checkpoints.resume():
        # Each rank reads its own parts, also if there were more ranks or fewer when they were saved.
        saved.load_into(model=model, optimizer=optimizer)
    for epoch in range(saved.step + 1 if saved else 1, options.total_epochs + 1):
        sampler.set_epoch(epoch)  # the order of an epoch depends on its number alone
        loss_sum = torch.zeros((), device=device)
        for inputs, targets in loader:
            loss = mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        # Every rank calls a collective, so it is outside of `if rank == 0`.
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss_sum.item() / len(loader) / ranks:.6f}", flush=True)
        # Every rank calls save(). due() is true before a stop.
        if checkpoints.due(epoch) or epoch == options.total_epochs:
            # Each rank saves its own parts.
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(epoch, states)
        # After SIGTERM or Ctrl-C all ranks end after the same epoch.
        if mpiddp.should_stop():
            return


if __name__ == "__main__":
    main()
