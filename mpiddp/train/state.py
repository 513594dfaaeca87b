"""What a training starts from: the model, its weights, DDP with fixed buckets, the optimizer.

    state = build_state(build_model(config, data, device), config, copies=[])

`sharded` is for --parallel fsdp and hsdp.
"""

# No `from __future__ import annotations`: DDP checks its hook's annotations as types, not as strings.
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.config import Config
from mpiddp.train.data import Data
from mpiddp.train.ema import Ema
from mpiddp.train.measure import StepTimer
from mpiddp.train.muon import Muon
from mpiddp.train.resnet import ARCHS, zero_init
from mpiddp.train.sharded import is_sharded, shard
from mpiddp.train.sync_bn import synchronized


@dataclass(frozen=True)
class State:
    """Everything that a step changes: the model, its optimizer, the gradient scaler of fp16, the clock."""

    model: nn.Module  # the bare one
    ddp: nn.Module  # the one to call in a step
    scored: nn.Module  # the one to call in an evaluation
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    timer: StepTimer
    ema: Ema | None = None


def choose_kernels(config: Config) -> None:
    """Select the fastest kernel that cuDNN finds for each shape, or with --deterministic reproducible ones.

    Call this before the first operation on a GPU, because cuBLAS reads its variable once.
    """
    if not config.deterministic:
        torch.backends.cudnn.benchmark = True
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # an operation without a reproducible kernel raises


def build_model(config: Config, data: Data, device: torch.device) -> nn.Module:
    """The bare model on the device, the same on every rank, in the memory layout of the images.

    fully_shard accepts contiguous weights only. A GPU computes in the layout of the images all the same.
    """
    torch.manual_seed(config.seed)
    model: nn.Module = ARCHS[config.arch](num_classes=data.num_classes, stem=config.stem)
    if config.zero_init:
        zero_init(model)
    if config.weights is not None:
        load_weights(model, config.weights)
    if config.sync_bn:
        model = synchronized(model, device)
    layout = torch.channels_last if config.parallel == "ddp" else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    if device.type == "cuda" and config.parallel == "ddp":
        stride_as_gradients(model)
    return model


def stride_as_gradients(model: nn.Module) -> None:
    """Give the weights of 1×1 convolutions the strides of their gradients under channels_last.

    Both strides describe the same memory. cuDNN writes those of channels_last, and torch leaves such weights
    as they are, so DDP would copy each of these gradients in every step, and warn.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4 and parameter.shape[2:] == (1, 1):
            channels = parameter.shape[1]
            strides = (channels, 1, channels, channels)
            parameter.data = parameter.data.as_strided(parameter.shape, strides)


def load_weights(model: nn.Module, path: str) -> None:
    """Load a torchvision state_dict, but no last layer of another number of classes. Raises UserError.

    `path`: a file of torch.save, or a folder of checkpoints.
    """
    try:
        if Path(path).is_dir():
            weights = mpiddp.load(path).state["model"]
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        own, weights, head = model.state_dict(), dict(weights), ("fc.weight", "fc.bias")
        fresh = {key: own[key] for key in head if weights[key].shape != own[key].shape}
        model.load_state_dict({**weights, **fresh})
    except UserError as error:
        raise UserError(f"--weights {error}") from None
    except OSError as error:
        raise UserError(f"--weights {path}: {error.strerror} (looked in {Path.cwd()}).") from None
    except UnpicklingError:  # torch's own sentence advises to run the file's code
        raise UserError(
            f"--weights {path}: it is not a file that torch.save wrote. Expected a state_dict."
        ) from None
    except Exception as error:  # no dict, a value that is no tensor, a shape of another model
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"--weights {path}: expected a state_dict of --arch: {reason}.") from None


def build_state(model: nn.Module, config: Config, copies: list[list[int]]) -> State:
    """The state of a training with this model: sharded over `copies`, else under DDP. A collective."""
    ddp = shard(model, config, copies) if copies else wrap_in_ddp(model, config)
    scored = model
    if config.compile != "off":
        ddp = torch.compile(ddp, mode=config.compile)  # type: ignore[assignment]
        scored = torch.compile(model, mode=config.compile)  # type: ignore[assignment]
    torch.manual_seed(config.seed + 1 + dist.get_rank())
    first = next(model.parameters())
    timer = StepTimer(first.device)
    if not copies:
        # A backward pass ends with the gradient of the first parameter. Then DDP waits for the other ranks.
        first.register_post_accumulate_grad_hook(lambda parameter: timer.phase_ends("backward"))
    # Unless --amp is fp16, it passes gradients through unscaled.
    scaler = torch.amp.GradScaler(first.device.type, enabled=config.amp == "fp16")
    ema = None if config.ema_decay is None else Ema(model)
    return State(model, ddp, scored, build_optimizer(model, config), scaler, timer, ema)


def wrap_in_ddp(model: nn.Module, config: Config) -> nn.Module:
    """The model under DistributedDataParallel, with its final buckets; one rank needs none. A collective."""
    if dist.get_world_size() == 1:
        return model
    # Each rank keeps its own BatchNorm statistics while it trains; `averaged_buffers` averages them for an
    # evaluation or a save. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    keep_own: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **keep_own)
    freeze_buckets(ddp, config)
    if config.grad_compression == "bf16":
        ddp.register_comm_hook(ddp.process_group, _in_bf16)
    return ddp


def freeze_buckets(ddp: DistributedDataParallel, config: Config) -> None:
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


def clear_gradients(ddp: nn.Module, config: Config) -> None:
    """Clear the gradients of the last step."""
    # Otherwise the first micro-batch's gradients would be where a CUDA graph writes the second's.
    keeps = config.compile not in ("off", "default") and config.grad_accum_steps > 1
    ddp.zero_grad(set_to_none=not keeps)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """That of --optimizer. Weight decay is on convolutions and the last layer's matrix only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # BatchNorm and biases
    undecayed = {"params": vectors, "weight_decay": 0.0}
    if config.optimizer == "muon":
        # The first convolution, whose filters are few and small, and the last layer are left to SGD.
        hidden = [p for p in matrices[1:] if p.ndim == 4]
        ends = [matrices[0], *(p for p in matrices[1:] if p.ndim != 4)]
        others = ({"params": ends, "weight_decay": config.weight_decay}, undecayed)
        return Muon(hidden, others, lr=config.lr, momentum=config.momentum)
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": config.weight_decay}, undecayed],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=True,
        fused=not is_sharded(model),
        foreach=is_sharded(model),  # torch has no fused SGD for shards
    )
    if config.amp == "fp16":
        # If fp16 overflows at the very first step, torch 2.13's fused SGD skips the step but keeps the
        # uninitialized momentum that it has allocated. Zeros give the same first step.
        for parameter in (*matrices, *vectors):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
