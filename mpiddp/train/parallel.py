"""The model of all ranks: under DistributedDataParallel, with its buckets and the compression of its
gradients; or sharded, see `fully_sharded`."""

# No `from __future__ import annotations`: DDP checks its hook's annotations as types, not as strings.
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mpiddp.errors import UserError
from mpiddp.train.config import TrainConfig
from mpiddp.train.copies import Copies

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # of torch.compile
POWERSGD_RANK = 4  # of the two matrices that approximate a gradient
POWERSGD_FROM_STEP = (
    100  # earlier gradients stay uncompressed: they change too fast for error feedback
)


def wrap(
    model: nn.Module, config: TrainConfig, shape: tuple[int, int, int], copies: Copies | None = None
) -> nn.Module:
    """Shard the model over the ranks of each copy, in place. Without `copies`, wrap it in
    DistributedDataParallel, freeze its buckets, and compile it with --compile.

    A collective: every rank must call it.
    """
    if copies:
        from mpiddp.train.fully_sharded import shard  # takes torch's DTensor along

        return shard(model, config, copies)
    # Each rank keeps its own BatchNorm statistics while it trains; `engine.averaged_buffers` averages
    # them for an evaluation or a save. torch 2.13 renamed the option.
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
    """Raise UserError for the combinations in which torch's PowerSGD fails."""
    if config.grad_compression != "powersgd":
        return
    if config.amp == "fp16":  # the error memory would keep the infinities of an overflow forever
        raise UserError(
            "--grad-compression powersgd and --amp fp16 are mutually exclusive: one overflow would "
            "ruin the training. Use --amp bf16, or --grad-compression fp16."
        )
    if device.type == "cpu" and torch.cuda.is_available():  # torch's hook synchronizes with any GPU
        raise UserError(
            "--grad-compression powersgd over gloo fails when torch sees a GPU. Set "
            "CUDA_VISIBLE_DEVICES=, or use --grad-compression bf16."
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether every forward pass of the model is a collective."""
    return hasattr(model, "set_requires_gradient_sync")  # of torch's FSDPModule


@contextlib.contextmanager
def reducing(model: nn.Module, reduces: bool) -> Iterator[None]:
    """Run a forward and a backward pass in the body, which reduces the gradients over the ranks or not."""
    if is_sharded(model):
        model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
        model.set_is_last_backward(reduces)  # type: ignore[operator]
        yield
    else:
        with contextlib.nullcontext() if reduces else model.no_sync():  # type: ignore[operator]
            yield


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that a forward pass without a backward pass has left."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def clear_gradients(ddp: nn.Module, config: TrainConfig) -> None:
    """Clear the gradients between two steps."""
    # Otherwise the first micro-batch's gradients would be where a CUDA graph writes the second's.
    keeps = config.compile in CUDA_GRAPH_MODES and config.grad_accum_steps > 1
    ddp.zero_grad(set_to_none=not keeps)


def freeze_buckets(
    ddp: DistributedDataParallel, config: TrainConfig, shape: tuple[int, int, int]
) -> None:
    """Run two discarded passes that change nothing but DDP's buckets, which are final afterwards.

    DDP regroups its gradients after the first backward pass. Sums over three or more ranks depend on
    the grouping, so without this a resumed run would sum differently from an uninterrupted one.
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
    """Compress the gradients for all-reduce, as --grad-compression selects.

    PowerSGD is torch's implementation of Vogels, Karimireddy and Jaggi 2019.
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
    """A hook that averages the gradients in `dtype`, with half the bytes of fp32.

    It supports bf16 over gloo as well; torch's own hook requires NCCL.
    """

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        # Divide first, because a sum of fp16 could overflow.
        rounded = bucket.buffer().to(dtype).div_(group.size())
        work = dist.all_reduce(rounded, group=group, async_op=True)
        mean: Future[Tensor] = work.get_future().then(
            lambda done: bucket.buffer().copy_(done.value()[0])
        )
        return mean

    return hook
