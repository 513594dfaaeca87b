"""A model over many ranks: --parallel ddp, or sharded by torch's fully_shard.

ddp     a copy on every rank
fsdp    one copy, over all ranks
hsdp    a copy on every host, over the ranks of the host
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from mpiddp.train.resnet import BLOCKS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wrap_in_ddp(model: nn.Module, images: Tensor) -> nn.Module:
    """The model under DistributedDataParallel, with its final buckets; one rank needs none. A collective.

    DDP regroups its gradients after the first backward pass. Sums over three or more ranks depend on the
    grouping, so without two discarded passes a resumed run would sum differently from an uninterrupted one.
    They have the shape of `images`.
    """
    if dist.get_world_size() == 1:
        return model
    # DDP would give all ranks BatchNorm's statistics of rank 0. torch 2.13 renamed the option.
    names = DistributedDataParallel.__init__.__code__.co_varnames
    renamed = "forward_sync_buffers" in names
    keep_own: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **keep_own)
    ddp.eval()  # BatchNorm keeps its statistics, and nothing draws a random number
    for _ in range(2):
        ddp(torch.zeros_like(images)).sum().backward()
    ddp.train()
    ddp.zero_grad()
    return ddp


def reducing(model: nn.Module, reduces: bool) -> contextlib.AbstractContextManager[None]:
    """The context of a pass that sums the gradients over the ranks, or does not."""
    if is_sharded(model):
        model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
        model.set_is_last_backward(reduces)  # type: ignore[operator]
    elif not reduces and dist.get_world_size() > 1:
        return model.no_sync()  # type: ignore[operator, no-any-return]
    return contextlib.nullcontext()


@contextlib.contextmanager
def scored_weights(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """In the body, the model is to be evaluated, with these values and the mean statistics. A collective."""
    state = model.state_dict()
    before = {name: state[name].clone() for name in values}
    model.load_state_dict(mean_statistics(values, model), strict=False)
    model.eval()
    yield
    for module in filter(is_sharded, model.modules()):
        module.reshard()  # type: ignore[operator]  # free what only a backward pass would free
    model.train()
    model.load_state_dict(before, strict=False)


def share_of_rank(num_images: int, largest: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The batches of this rank in an evaluation: the numbers of its images, and which are beyond its share.

    All ranks have as many batches, of one size, and images beyond the share fill the last batch: each pass of
    a sharded model needs all ranks, and a compiled model is compiled for each size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = math.ceil(num_images / world_size)
    num_batches = math.ceil(share / largest)
    size = math.ceil(share / num_batches)
    first, end = (num_images * part // world_size for part in (rank, rank + 1))
    numbers = torch.arange(first, first + num_batches * size)
    return numbers.clamp(max=num_images - 1).split(size), (numbers >= end).split(size)


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's running statistics. Each rank has its own, from its own images."""
    return {name: value for name, value in model.named_buffers() if value.is_floating_point()}


def mean_statistics(values: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The values of a state_dict, with the mean of all ranks for BatchNorm's statistics. A collective.

    A step computes with the statistics of its own images, so only a score and a checkpoint need this.
    """
    statistics = {name: values[name] for name in statistics_of(model)}
    if not statistics or dist.get_world_size() == 1:
        return dict(values)
    total = torch.cat([value.reshape(-1) for value in statistics.values()])
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).split([value.numel() for value in statistics.values()])
    shaped = (mean.view_as(value) for mean, value in zip(means, statistics.values(), strict=True))
    return {**values, **dict(zip(statistics, shaped, strict=True))}


def is_sharded(model: nn.Module) -> bool:
    """Whether every forward pass of the model is a collective."""
    return hasattr(model, "set_requires_gradient_sync")  # of torch's FSDPModule


def shard(model: nn.Module, amp: str, *, copies: int) -> nn.Module:
    """Shard the parameters in place over the ranks of each copy. A collective.

    A block gathers its own parameters before it computes, and frees them afterwards. With --amp, the gathered
    parameters and the activations are of its dtype, and gradients are averaged in fp32. BatchNorm computes in
    fp32, as under autocast.
    """
    for parameter in model.parameters():  # as DDP does, because processors may round differently
        dist.broadcast(parameter.detach(), src=0)
    # Few trainings need torch's DTensor, which takes a while to import.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.modules.batchnorm import _BatchNorm

    sizes: dict[str, Any] = {"dp_shard": -1} | ({"dp_replicate": copies} if copies > 1 else {})
    mesh = mpiddp.mesh(device_type=next(model.parameters()).device.type, **sizes)
    policy = MixedPrecisionPolicy()
    if amp != "off":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[amp], reduce_dtype=torch.float32)
        norms: list[nn.Module] = [
            layer for layer in model.modules() if isinstance(layer, _BatchNorm)
        ]
        # They have few bytes in many layers, so one group gathers all of them at once.
        of_norms = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(norms, mesh=mesh, mp_policy=of_norms, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    return model


def ranks_with_same_shards(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks of all copies that hold the shards of this rank; None under DDP, or with one copy."""
    mesh: Any = getattr(next(model.parameters()), "device_mesh", None)
    has_copies = mesh is not None and "dp_replicate" in mesh.mesh_dim_names
    return mesh.get_group("dp_replicate") if has_copies else None


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank: [world_size]. A collective: every rank must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
