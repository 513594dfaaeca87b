"""--parallel fsdp and hsdp: the model sharded by torch's fully_shard.

fsdp    one copy, over all ranks
hsdp    a copy on every host, over the ranks of the host
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mpiddp
from mpiddp.train.resnet import BLOCKS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
