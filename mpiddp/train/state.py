"""What a training starts from: the model, DDP with fixed buckets, the optimizer.

    state = build_state(build_model(config, data, device), config)

`sharded` is for --parallel fsdp and hsdp.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.train.config import Config
from mpiddp.train.data import Data
from mpiddp.train.ema import Ema
from mpiddp.train.measure import StepTimer
from mpiddp.train.muon import Muon
from mpiddp.train.resnet import ARCHS, WhitenedResNet, zero_init
from mpiddp.train.sharded import is_sharded, shard
from mpiddp.train.sync_bn import synchronized

WHITENING_IMAGES = 1000  # whose patches stand for those of the data set


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
    if isinstance(model, WhitenedResNet):
        numbers = torch.arange(min(WHITENING_IMAGES, data.train.num_images))
        ((images, _),) = data.train.batches([numbers], epoch=0)
        model.whiten(images.cpu())
    if config.zero_init:
        zero_init(model)
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


def build_state(model: nn.Module, config: Config, num_hosts: int = 1) -> State:
    """The state of a training with this model: in shards, or else under DDP. A collective."""
    uses_ddp = config.parallel == "ddp"
    ddp = wrap_in_ddp(model, config) if uses_ddp else shard(model, config, num_hosts)
    scored = model
    if config.compile == "on":
        ddp = torch.compile(ddp)  # type: ignore[assignment]
        scored = torch.compile(model)  # type: ignore[assignment]
    torch.manual_seed(config.seed + 1 + dist.get_rank())
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    timer = StepTimer(first.device)
    if uses_ddp:
        # A backward pass ends with the gradient of the first parameter. Then DDP waits for the other ranks.
        first.register_post_accumulate_grad_hook(lambda parameter: timer.phase_ends("backward"))
    ema = None if config.ema_decay is None else Ema(model)
    # Unless --amp is fp16, it passes gradients through unscaled.
    scaler = torch.amp.GradScaler(first.device.type, enabled=config.amp == "fp16")
    return State(model, ddp, scored, build_optimizer(model, config), scaler, timer, ema)


def wrap_in_ddp(model: nn.Module, config: Config) -> nn.Module:
    """The model under DistributedDataParallel, with its final buckets; one rank needs none. A collective."""
    if dist.get_world_size() == 1:
        return model
    # DDP would give all ranks BatchNorm's statistics of rank 0, and `average_statistics` gives them the mean.
    # torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    keep_own: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **keep_own)
    freeze_buckets(ddp, config)
    return ddp


def freeze_buckets(ddp: DistributedDataParallel, config: Config) -> None:
    """Run two discarded passes that change nothing but DDP's buckets, which are final afterwards.

    DDP regroups its gradients after the first backward pass. Sums over three or more ranks depend on
    the grouping, so without this a resumed run would sum differently from an uninterrupted one.
    """
    device = next(ddp.parameters()).device
    images = torch.zeros(2, 3, config.image_size, config.image_size, device=device)
    ddp.eval()  # BatchNorm keeps its statistics, and nothing draws a random number
    for _ in range(2):
        ddp(images).sum().backward()
    ddp.train()
    ddp.zero_grad()


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """That of --optimizer. Weight decay is on convolutions and the last layer's matrix only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]  # BatchNorm and biases
    undecayed = {"params": vectors, "weight_decay": 0.0}
    if config.optimizer == "muon":
        # A convolution of the images, whose filters are few and small, and the last layer are left to SGD.
        hidden = [p for p in matrices if p.ndim == 4 and p.shape[1] > 3]
        ends = [p for p in matrices if p.ndim != 4 or p.shape[1] <= 3]
        others = ({"params": ends, "weight_decay": config.weight_decay}, undecayed)
        return Muon(hidden, others, lr=config.lr, momentum=config.momentum)
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": config.weight_decay}, undecayed],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,  # torch refuses it without momentum, where both are plain SGD
        fused=not is_sharded(model),
        foreach=is_sharded(model),  # torch has no fused SGD for shards
    )
    if config.amp == "fp16":
        # If fp16 overflows at the very first step, torch 2.13's fused SGD skips the step but keeps the
        # uninitialized momentum that it has allocated. Zeros give the same first step.
        for parameter in (*matrices, *vectors):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
