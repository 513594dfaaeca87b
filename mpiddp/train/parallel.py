"""The model under DistributedDataParallel: its buckets, and what of the gradients goes over the wire."""

# No `from __future__ import annotations`: DDP looks at its hook's annotations, not at their names.
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mpiddp.errors import UserError
from mpiddp.train.config import TrainConfig

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # of torch.compile
POWERSGD_RANK = 4  # of the two matrices that stand for one
POWERSGD_FROM_STEP = 100  # gradients are whole before: they change too fast for a memory of errors


def wrap(model: nn.Module, config: TrainConfig, shape: tuple[int, int, int]) -> nn.Module:
    """The model under DistributedDataParallel, its buckets frozen; compiled if --compile says so."""
    # Each rank keeps its own BatchNorm statistics while it trains; `engine.averaged_buffers` brings
    # them together where they are read. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    keep_own: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=config.bucket_mb, **keep_own
    )
    freeze_buckets(ddp, config, shape)
    compress(ddp, config)
    if config.compile != "off":
        return torch.compile(ddp, mode=config.compile)  # type: ignore[return-value]
    return ddp


def check_compression(config: TrainConfig, device: torch.device) -> None:
    """Raises UserError for PowerSGD where torch's own fails."""
    if config.grad_compression != "powersgd":
        return
    if config.amp == "fp16":  # its memory of errors keeps the infinities of an overflow for good
        raise UserError(
            "--grad-compression powersgd and --amp fp16 exclude each other: one overflow would end "
            "the learning. Use --amp bf16, or --grad-compression fp16."
        )
    if device.type == "cpu" and torch.cuda.is_available():  # it asks any GPU for the time
        raise UserError(
            "--grad-compression powersgd over gloo fails where torch sees a GPU. Hide it: "
            "CUDA_VISIBLE_DEVICES=, or use --grad-compression bf16."
        )


def clear_gradients(ddp: nn.Module, config: TrainConfig) -> None:
    """Between two steps."""
    # Else the first micro-batch's gradients would lie where a CUDA graph writes the second's.
    keeps = config.compile in CUDA_GRAPH_MODES and config.grad_accum_steps > 1
    ddp.zero_grad(set_to_none=not keeps)


def freeze_buckets(
    ddp: DistributedDataParallel, config: TrainConfig, shape: tuple[int, int, int]
) -> None:
    """Run two throw-away steps, and leave no trace but DDP's final buckets.

    DDP regroups its gradients after the first backward pass. Sums over three or more ranks depend
    on the grouping, so without this a resumed run would add up otherwise than one that went on.
    """
    device = next(ddp.parameters()).device
    buffers = [buffer.clone() for buffer in ddp.buffers()]
    cpu_rng = torch.get_rng_state()
    for _ in range(2):
        ddp(torch.zeros(2, *shape, device=device)).sum().backward()
    clear_gradients(ddp, config)
    torch.set_rng_state(cpu_rng)
    for buffer, saved in zip(ddp.buffers(), buffers, strict=True):
        buffer.copy_(saved)


def compress(ddp: DistributedDataParallel, config: TrainConfig) -> None:
    """Let the ranks exchange less than fp32 gradients, as --grad-compression says.

    PowerSGD: Vogels, Karimireddy and Jaggi 2019, in torch's implementation.
    """
    if config.grad_compression == "powersgd":
        state = PowerSGDState(
            process_group=ddp.process_group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_FROM_STEP,
            random_seed=config.seed,
        )
        ddp.register_comm_hook(state, powerSGD_hook)
    elif config.grad_compression != "off":
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[config.grad_compression]
        ddp.register_comm_hook(ddp.process_group, _rounded_to(dtype))


def _rounded_to(
    dtype: torch.dtype,
) -> Callable[[dist.ProcessGroup, dist.GradBucket], Future[Tensor]]:
    """A hook that averages the gradients in `dtype`: half the bytes.

    Also for bf16 over gloo, where torch's own hook asks for NCCL.
    """

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        # Divided first: a sum of fp16 could overflow.
        rounded = bucket.buffer().to(dtype).div_(group.size())
        work = dist.all_reduce(rounded, group=group, async_op=True)
        mean: Future[Tensor] = work.get_future().then(
            lambda done: bucket.buffer().copy_(done.value()[0])
        )
        return mean

    return hook
