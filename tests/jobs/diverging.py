"""Check ranks whose state differs in several ways, and write the sentences into FILE.

    mpirun -np 3 python -m tests.jobs.diverging FILE

`tests.jobs.turns` can run it too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.divergence import check_divergence, find_divergence
from mpiddp.runtime.torch.process_group import default_group

STEP = 200


def flip(tensor: Tensor, bit: int = 0) -> None:
    """Flip a bit of the last element, in place; of a DTensor, in the shard of this rank."""
    own = tensor.detach()
    if isinstance(own, DTensor):
        own = own.to_local()
    bits = own.view(torch.int32)
    bits[(-1,) * bits.ndim] ^= 1 << bit


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with BatchNorm after two steps under DDP, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        ddp(torch.randn(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp, optimizer


Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def flip_parameter(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip(ddp.module[3].weight)


def flip_state(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip(optimizer.state[ddp.module[0].bias]["exp_avg_sq"], bit=30)


def flip_both(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip_parameter(ddp, optimizer)
    flip_state(ddp, optimizer)


def flip_buffer(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip(ddp.module[1].running_mean)


def lose_state(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[ddp.module[3].bias]["exp_avg"]


def nothing(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def sentence(change: Change, *ranks: int) -> str:
    """The result of the check after `change` on these ranks."""
    ddp, optimizer = trained()
    if dist.get_rank() in ranks:
        change(ddp, optimizer)
    return find_divergence(ddp, optimizer, step=STEP)


def error_of_the_public_function() -> str:
    ddp, optimizer = trained()
    check_divergence(ddp, optimizer)
    if dist.get_rank() == 1:
        flip_parameter(ddp, optimizer)
    try:
        check_divergence(ddp)
    except JobFailed as error:
        return str(error)
    return "no error"


def sharded() -> str:
    """Each rank has other bits of a DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(4, 12)
    whole = torch.arange(48.0).view(12, 4)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = model.weight.detach()
    return find_divergence(model, optimizer, step=STEP)


def copies_of_shards() -> str:
    """The last rank has other bits of a shard that all ranks hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copy", "shard"))
    model = nn.Linear(4, 12, bias=False)
    whole = torch.arange(48.0).view(12, 4)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
    group = mesh.get_group("copy")
    check_divergence(model, group=group)
    if dist.get_rank() == dist.get_world_size() - 1:
        flip(model.weight)
    return find_divergence(model, None, step=STEP, group=group)


def only_shards() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(4, 12, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    try:
        check_divergence(model)
    except UserError as error:
        return str(error)
    return "no error"


class TwoWeights(nn.Module):
    """Not wrapped by DDP, and a child has the name that DDP gives to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.module = nn.Linear(3, 3)


def with_a_child_named_module() -> str:
    torch.manual_seed(0)
    model = TwoWeights()
    if dist.get_rank() == dist.get_world_size() - 1:
        flip(model.weight)
    return find_divergence(model, None, step=STEP)


def within_a_group() -> str:
    """Rank 0 has other bits, and is not in the group."""
    ddp, optimizer = trained()
    if dist.get_rank() == 0:
        flip_parameter(ddp, optimizer)
    group = dist.new_group(list(range(1, dist.get_world_size())))
    return find_divergence(ddp, optimizer, step=STEP, group=group)


def main(file: str) -> None:
    with (
        join() as coordinator,
        default_group(coordinator, "gloo", torch.device("cpu"), timeout_s=60),
    ):
        last = coordinator.world.world_size - 1
        found = {
            "nothing": sentence(nothing, 0),
            "parameter": sentence(flip_parameter, last),
            "state": sentence(flip_state, 0),
            "both": sentence(flip_both, last),
            "buffer": sentence(flip_buffer, last),
            "lost": sentence(lose_state, last),
            "public": error_of_the_public_function(),
            "sharded": sharded(),
            "copies of shards": copies_of_shards(),
            "only shards": only_shards(),
            "child named module": with_a_child_named_module(),
            "group": within_a_group(),
        }
        everyone = coordinator.all_gather_json(found, timeout_s=60)
        assert all(each == found for each in everyone), everyone  # all ranks know
        if coordinator.world.rank == 0:
            Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
