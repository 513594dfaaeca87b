"""The model under torch's fully_shard: each rank keeps a shard of the parameters, gradients and momentum.

A block's parameters are gathered before it computes, and freed afterwards. Its gradients are averaged over
the ranks, and each rank keeps its shard of them. Every forward pass is therefore a collective.

Only a sharded training imports this module: it takes torch's DTensor along.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from mpiddp.train.config import TrainConfig
from mpiddp.train.copies import Copies
from mpiddp.train.resnet import BasicBlock, Bottleneck

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, config: TrainConfig, copies: Copies) -> nn.Module:
    """Shard the parameters of the model, which lies on the device, in place. A collective.

    With --amp, the gathered parameters and the activations have its dtype, and gradients are averaged in
    fp32. BatchNorm computes in fp32, as under autocast.
    """
    mesh = _mesh(copies, next(model.parameters()).device)
    policy = _policy(config)
    if config.amp != "off":
        norms: list[nn.Module] = [each for each in model.modules() if isinstance(each, _BatchNorm)]
        if norms:  # few bytes in many layers: one group gathers all of them at once
            own = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(norms, mesh=mesh, mp_policy=own, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, (BasicBlock, Bottleneck)):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    if config.amp != "off":
        policy = replace(policy, output_dtype=torch.float32)  # of the logits
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _mesh(copies: Copies, device: torch.device) -> DeviceMesh:
    """The ranks as torch's mesh, of one dimension for one copy."""
    if len(copies) == 1:
        return DeviceMesh(device.type, copies[0], mesh_dim_names=("shard",))
    return DeviceMesh(device.type, copies, mesh_dim_names=("replicate", "shard"))


def _policy(config: TrainConfig) -> MixedPrecisionPolicy:
    if config.amp == "off":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_DTYPES[config.amp], reduce_dtype=torch.float32)
