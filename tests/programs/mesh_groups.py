"""Every rank forms a mesh and prints its groups.

    mesh_groups.py HOW dp=3 tp=2 … [device_type=cpu] [tp_across_hosts]

HOW is `init` for mpiddp.init(), or `plain` for init_process_group. Each rank checks that a sum over a group
is that of its ranks, and that a rank's coordinate is its rank in the group, on which DTensor relies. In a
size, RANK stands for the rank, so that the calls of the ranks differ.
"""

import json
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import mpiddp

how, *sizes = sys.argv[1:]
if how == "init":
    mpiddp.init(backend="gloo")
else:
    dist.init_process_group("gloo")
across = "tp_across_hosts" in sizes
rank = dist.get_rank()
given = dict(each.replace("RANK", str(rank)).split("=") for each in sizes if "=" in each)
device_type = given.pop("device_type", None)
mesh = mpiddp.mesh(
    **{name: int(size) for name, size in given.items()},
    tp_across_hosts=across,
    device_type=device_type,
)

groups = {}
for name in mesh.mesh_dim_names or ():
    group = mesh[name].get_group()
    members = mesh[name].mesh.tolist()
    total = torch.tensor(2**rank)
    dist.all_reduce(total, group=group)
    assert int(total) == sum(2**member for member in members)
    assert members[mesh.get_local_rank(name)] == rank
    assert dist.get_rank(group) == mesh.get_local_rank(name)
    numbers = torch.arange(2.0 * len(members) + 1)
    shards = distribute_tensor(numbers, mesh[name], [Shard(0)], src_data_rank=None)
    assert torch.equal(shards.full_tensor(), numbers)  # gathered in the order of the coordinates
    groups[name] = members
line = json.dumps({"rank": rank, "host": socket.gethostname(), "groups": groups})
print(f"{line}\n", end="", flush=True)  # one write: torchrun's ranks share a pipe
if how == "plain":
    dist.destroy_process_group()
