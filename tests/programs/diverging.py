"""A script whose ranks no longer agree: one bit of one tensor differs on the last rank.

    mpiddp launch -n 3 tests/programs/diverging.py WHAT

WHAT is "parameter", "optimizer" or "shard". Each rank has other statistics of BatchNorm.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpiddp

what = sys.argv[1]
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
    tensor.detach().view(torch.int32)[-1] ^= 1


mpiddp.check_divergence(ddp, optimizer, step=100)
print("equal before\n", end="", flush=True)
if what == "shard":
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copy", "shard"))
    layer = nn.Linear(4, 12, bias=False)
    layer.weight = nn.Parameter(
        distribute_tensor(torch.arange(48.0).view(12, 4), mesh, [Replicate(), Shard(0)])
    )
    if is_last:
        flip(layer.weight.to_local())
    mpiddp.check_divergence(layer, group=mesh.get_group("copy"))
if what == "parameter" and is_last:
    flip(model[3].weight)
if what == "optimizer" and is_last:
    flip(optimizer.state[model[0].bias]["exp_avg_sq"])
mpiddp.check_divergence(ddp, optimizer, step=200)
