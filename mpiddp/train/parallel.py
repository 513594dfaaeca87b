"""The model of all ranks: under DistributedDataParallel, or sharded by torch's fully_shard.

--parallel ddp     a copy on every rank
--parallel fsdp    one copy, over all ranks
--parallel hsdp    a copy on every host, over the ranks of the host
"""

# No `from __future__ import annotations`: DDP checks its hook's annotations as types, not as strings.
import contextlib
import inspect
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.config import gathered
from mpiddp.train.resnet import BasicBlock, Bottleneck

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_copies(config: Namespace, world: mpiddp.World) -> list[list[int]]:
    """The ranks that share each copy of the model, [copies][ranks]; [] under DDP. A collective."""
    ranks = list(range(world.world_size))
    if config.parallel == "ddp":
        return []
    if config.parallel == "fsdp":
        return [ranks]
    hosts = gathered(f"{world.hostname} (node {world.node_rank})")
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        raise UserError(
            "--parallel hsdp shards the model within a host, so every host needs the same number of ranks; "
            f"found {', '.join(f'{count} on {name}' for name, count in counts.items())}. Give the hosts "
            "equal slots, or use --parallel fsdp."
        )
    return [[rank for rank in ranks if hosts[rank] == host] for host in counts]


def wrap(model: nn.Module, config: Namespace, copies: list[list[int]]) -> nn.Module:
    """Shard the model in place over the ranks of each copy; without `copies`, wrap it in DDP."""
    if copies:
        return _shard(model, config, copies)
    # Each rank keeps its own BatchNorm statistics while it trains; `step.averaged_buffers` averages
    # them for an evaluation or a save. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    keep_own: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **keep_own)
    freeze_buckets(ddp, config)
    if config.grad_compression == "bf16":
        ddp.register_comm_hook(ddp.process_group, _in_bf16)
    if config.compile != "off":
        return torch.compile(ddp, mode=config.compile)  # type: ignore[return-value]
    return ddp


def freeze_buckets(ddp: DistributedDataParallel, config: Namespace) -> None:
    """Run two discarded passes that change nothing but DDP's buckets, which are final afterwards.

    DDP regroups its gradients after the first backward pass. Sums over three or more ranks depend on
    the grouping, so without this a resumed run would sum differently from an uninterrupted one.
    """
    device = next(ddp.parameters()).device
    images = torch.zeros(2, 3, config.image_size, config.image_size, device=device)
    buffers = [buffer.clone() for buffer in ddp.buffers()]
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            ddp(images).sum().backward()
    clear_gradients(ddp, config)
    for buffer, saved in zip(ddp.buffers(), buffers, strict=True):
        buffer.copy_(saved)


def _in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """torch's own hook, which DDP would refuse by its name without NCCL. gloo supports it too."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(group, bucket)


def is_sharded(model: nn.Module) -> bool:
    """Whether every forward pass of the model is a collective."""
    return hasattr(model, "set_requires_gradient_sync")  # of torch's FSDPModule


def reducing(model: nn.Module, reduces: bool) -> Any:
    """The context of a forward and a backward pass, which reduces the gradients over the ranks or not."""
    if is_sharded(model):
        model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
        model.set_is_last_backward(reduces)  # type: ignore[operator]
    elif not reduces:
        return model.no_sync()  # type: ignore[operator]
    return contextlib.nullcontext()


def clear_gradients(ddp: nn.Module, config: Namespace) -> None:
    """Clear the gradients of the last step."""
    # Otherwise the first micro-batch's gradients would be where a CUDA graph writes the second's.
    keeps = config.compile not in ("off", "default") and config.grad_accum_steps > 1
    ddp.zero_grad(set_to_none=not keeps)


def _shard(model: nn.Module, config: Namespace, copies: list[list[int]]) -> nn.Module:
    """Shard the parameters. A block gathers its own before it computes, and frees them afterwards.

    With --amp, the gathered parameters and the activations have its dtype, and gradients are averaged in
    fp32. BatchNorm computes in fp32, as under autocast.
    """
    # Few trainings need torch's DTensor, which takes a while to import.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.modules.batchnorm import _BatchNorm

    device = next(model.parameters()).device
    ranks = torch.tensor(copies).squeeze(0)  # [ranks] of one copy, else [copies, ranks]
    names = ("replicate", "shard")[-ranks.ndim :]
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if config.amp != "off":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.amp], reduce_dtype=torch.float32)
        norms: list[nn.Module] = [each for each in model.modules() if isinstance(each, _BatchNorm)]
        # Few bytes in many layers: one group gathers all of them at once.
        own = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(norms, mesh=mesh, mp_policy=own, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, (BasicBlock, Bottleneck)):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    of_logits = replace(policy, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=of_logits)
    return model


def ranks_with_same_shards(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks of all copies that hold the shards of this rank; None for those of DDP, or of one copy."""
    mesh: Any = getattr(next(model.parameters()), "device_mesh", None)
    has_copies = mesh is not None and "replicate" in mesh.mesh_dim_names
    return mesh.get_group("replicate") if has_copies else None
