"""A script whose ranks no longer agree: one bit of one tensor differs on the last rank.

    mpiddp launch -n 3 tests/programs/diverging.py

It is a bit of a shard, then of a parameter, which it prints and repairs, and at last one of the optimizer.
Each rank has other statistics of BatchNorm.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpiddp

world = mpiddp.init(backend="gloo")
is_last = world.rank == world.world_size - 1
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(world.rank)
for _ in range(2):
    ddp(torch.randn(2, 3, 4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip(tensor):
    if is_last:
        tensor.detach().view(torch.int32)[-1] ^= 1


def prints_the_difference(tensor, *checked, **of_group):
    flip(tensor)
    try:
        mpiddp.check_divergence(*checked, **of_group)
    except mpiddp.JobFailed as error:
        print(f"{error}\n", end="", flush=True)
    flip(tensor)


mpiddp.check_divergence(ddp, optimizer, step=100)
print("equal before\n", end="", flush=True)
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copy", "shard"))
layer = nn.Linear(4, 12, bias=False)
layer.weight = nn.Parameter(
    distribute_tensor(torch.arange(48.0).view(12, 4), mesh, [Replicate(), Shard(0)])
)
prints_the_difference(layer.weight.to_local(), layer, group=mesh.get_group("copy"))
prints_the_difference(model[3].weight, ddp, optimizer)
flip(optimizer.state[model[0].bias]["exp_avg_sq"])
mpiddp.check_divergence(ddp, optimizer, step=200)
