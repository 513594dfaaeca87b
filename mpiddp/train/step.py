"""The parts of a step: the model, the optimizer, the learning rate, one backward pass; and an exact score."""

from __future__ import annotations

import contextlib
import math
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from mpiddp.errors import UserError
from mpiddp.train.config import memory_format
from mpiddp.train.datasets import Batch, Data, Dataset
from mpiddp.train.measure import StepTimer
from mpiddp.train.muon import Muon
from mpiddp.train.parallel import DTYPES, clear_gradients, is_sharded, reducing, wrap
from mpiddp.train.resnet import ARCHS
from mpiddp.train.sync_bn import synchronized

REFERENCE_BATCH = 256  # images: the global batch of --lr (Goyal et al. 2017, section 2.1)
MAX_WARMUP_EPOCHS = 5
MOMENTUM = 0.9  # Nesterov's
WEIGHT_DECAY = 5e-4
BATCH_PIXELS = 500 * 32 * 32  # of an evaluation batch, when the training batch is smaller


@dataclass(frozen=True)
class State:
    """Everything that a step changes: the model, its optimizer, the gradient scaler of fp16, the clock."""

    model: nn.Module  # the bare one
    ddp: nn.Module  # the one to call
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    timer: StepTimer


def build_state(model: nn.Module, config: Namespace, copies: list[list[int]]) -> State:
    """The state of a training with this model, over `copies` of `parallel.find_copies`. A collective."""
    ddp = wrap(model, config, copies)
    torch.manual_seed(config.seed + 1 + dist.get_rank())
    first = next(model.parameters())
    timer = StepTimer(first.device)
    if not is_sharded(ddp):
        # A backward pass ends with the gradient of the first parameter. Then DDP waits for the other ranks.
        first.register_post_accumulate_grad_hook(lambda parameter: timer.phase_ends("backward"))
    # Unless --amp is fp16, it passes gradients through unscaled.
    scaler = torch.amp.GradScaler(first.device.type, enabled=config.amp == "fp16")
    return State(model, ddp, build_optimizer(model, config), scaler, timer)


def build_model(config: Namespace, data: Data, device: torch.device) -> nn.Module:
    """The bare model on the device, the same on every rank, in the memory layout of the images."""
    torch.manual_seed(config.seed)
    model: nn.Module = ARCHS[config.arch](num_classes=data.num_classes, stem=config.stem)
    if config.weights is not None:
        load_weights(model, config.weights)
    if config.sync_bn:
        model = synchronized(model, device)
    model.to(device, memory_format=memory_format(config))  # type: ignore[call-overload]
    return model


def load_weights(model: nn.Module, path: str) -> None:
    """Load a torchvision state_dict, but no last layer of another number of classes. Raises UserError."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--weights {path}: {error.strerror} (looked in {Path.cwd()}).") from None
    except Exception:  # a dozen types; torch's own sentence advises to run the file's code
        raise UserError(
            f"--weights {path}: it is not a file that torch.save wrote. Expected a state_dict."
        ) from None
    try:
        own, weights, head = model.state_dict(), dict(weights), ("fc.weight", "fc.bias")
        fresh = {key: own[key] for key in head if weights[key].shape != own[key].shape}
        model.load_state_dict({**weights, **fresh})
    except Exception as error:  # no dict, a value that is no tensor, a shape of another model
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"--weights {path}: expected a state_dict of --arch: {reason}.") from None


def choose_kernels(config: Namespace) -> None:
    """Select the fastest kernel that cuDNN finds for each shape, or with --deterministic reproducible ones.

    Call this before the first operation on a GPU, because cuBLAS reads its variable once.
    """
    if not config.deterministic:
        torch.backends.cudnn.benchmark = True
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # an operation without a reproducible kernel raises


def build_optimizer(model: nn.Module, config: Namespace) -> torch.optim.Optimizer:
    """That of --optimizer. Weight decay is on convolutions and the last layer's matrix only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # BatchNorm and biases
    undecayed = {"params": vectors, "weight_decay": 0.0}
    if config.optimizer == "muon":
        # The first convolution, whose filters are few and small, and the last layer are left to SGD.
        hidden = [p for p in matrices[1:] if p.ndim == 4]
        ends = [matrices[0], *(p for p in matrices[1:] if p.ndim != 4)]
        others = ({"params": ends, "weight_decay": WEIGHT_DECAY}, undecayed)
        return Muon(hidden, others, lr=config.lr, momentum=MOMENTUM)
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, undecayed],
        lr=config.lr,
        momentum=MOMENTUM,
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


def learning_rate(step: int, steps_per_epoch: int, config: Namespace) -> float:
    """The learning rate of a step, a pure function: a checkpoint does not contain it.

    It scales with the batch (Goyal et al. 2017). It rises linearly in a quarter of the epochs, at most 5.
    Then "one-cycle" falls linearly to zero (Smith & Topin 2017, without the short last phase), "cosine" falls
    to zero along half a cosine (Loshchilov & Hutter 2016), "step" divides by 10 at 1/2, 3/4 and 7/8 of the
    remaining steps, and "constant" stays.
    """
    peak: float = config.lr * config.global_batch_size / REFERENCE_BATCH
    warmup: int = round(steps_per_epoch * min(MAX_WARMUP_EPOCHS, config.epochs / 4))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress: float = (step - warmup) / max(1, steps_per_epoch * config.epochs - warmup)
    if config.schedule == "one-cycle":
        return peak * (1 - progress)
    if config.schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "step":
        return float(peak * 0.1 ** sum(progress >= mark for mark in (1 / 2, 3 / 4, 7 / 8)))
    return peak


def train_step(state: State, batches: Iterator[Batch], lr: float, config: Namespace) -> Tensor:
    """One step of the optimizer over this rank's next batches, see `backward`. It leaves its gradients."""
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    loss_sum = backward(state, batches, config)
    if config.clip_grad_norm is not None:  # the norm of all parameters, over all shards
        state.scaler.unscale_(state.optimizer)
        clip_grad_norm_(state.model.parameters(), config.clip_grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    return loss_sum


def backward(state: State, batches: Iterator[Batch], config: Namespace) -> Tensor:
    """Compute the gradients of the mean loss over the step's global batch, equal on every rank.

    The timer's phases are "data", "forward", "backward", and "waiting" for the sum over all ranks. Shards
    and --sync-bn wait within the passes, and have no such phase. Returns the sum of the losses of this rank's
    images: a scalar on the device.
    """
    clear_gradients(state.ddp, config)
    loss_sum = torch.zeros((), device=next(state.model.parameters()).device)
    waits_last = not (is_sharded(state.ddp) or config.sync_bn)
    # The ranks take the mean of their gradients; this makes it the mean over all images.
    weight = dist.get_world_size() / config.global_batch_size
    for left in reversed(range(config.grad_accum_steps)):
        images, labels = next(batches)
        state.timer.phase_ends("data")
        with reducing(state.ddp, left == 0):
            with autocast(config, images.device):
                loss = F.cross_entropy(state.ddp(images), labels, reduction="sum")
            state.timer.phase_ends("forward")
            state.scaler.scale(loss * weight).backward()
            state.timer.phase_ends("waiting" if waits_last and left == 0 else "backward")
        loss_sum += loss.detach()
    return loss_sum


def autocast(config: Namespace, device: torch.device) -> torch.autocast:
    """The autocast of --amp. A sharded model has its own policy instead, see `parallel`."""
    enabled = config.amp != "off" and config.parallel == "ddp"
    return torch.autocast(device.type, dtype=DTYPES.get(config.amp), enabled=enabled)


@contextlib.contextmanager
def averaged_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Average BatchNorm's running statistics over the ranks while the body runs. A collective.

    So all ranks evaluate and save the same model, and the training that follows does not change. Gives the
    body this rank's own statistics, for `restore_buffers`.
    """
    own = torch.cat([buffer.reshape(-1) for buffer in _statistics(model)])
    total = own.clone()
    dist.all_reduce(total)
    restore_buffers(model, total / dist.get_world_size())
    try:
        yield own
    finally:
        restore_buffers(model, own)


def restore_buffers(model: nn.Module, own: Tensor) -> None:
    """Give the model the statistics that `averaged_buffers` has given: one after another, [elements]."""
    buffers = _statistics(model)
    parts = own.split([buffer.numel() for buffer in buffers])
    for buffer, values in zip(buffers, parts, strict=True):
        buffer.copy_(values.view_as(buffer))


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that matter and differ from rank to rank: BatchNorm does not use its count of batches."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, config: Namespace) -> tuple[float, float]:
    """Score the bare model on all images of the data set. A collective: every rank must call it.

    Each image is on exactly one rank, and the ranks add sums, not means. The batch size does not change the
    result, because BatchNorm uses its running statistics. Returns the fraction of images that it classifies,
    and its mean cross-entropy.
    """
    batch_size = max(config.batch_size, 1, BATCH_PIXELS // config.image_size**2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, end = (dataset.num_images * each // world_size for each in (rank, rank + 1))
    indices = list(torch.arange(first, end).split(batch_size)) if end > first else []
    num_counted = len(indices)
    if is_sharded(model):  # each pass needs all ranks, the one with the largest share too
        most = math.ceil(math.ceil(dataset.num_images / world_size) / batch_size)
        indices += [torch.tensor([0])] * (most - num_counted)
    totals = torch.zeros(2, dtype=torch.float64, device=dataset.device)  # correct, loss
    model.eval()
    with averaged_buffers(model), autocast(config, dataset.device):
        for index, (images, labels) in enumerate(dataset.batches(indices, epoch=0)):
            logits = model(images)
            if index < num_counted:
                totals[0] += (logits.argmax(1) == labels).sum()
                totals[1] += F.cross_entropy(logits.float(), labels, reduction="sum")
    model.train()
    for module in model.modules():
        if is_sharded(module):  # free what a forward pass without a backward pass has gathered
            module.reshard()  # type: ignore[operator]
    dist.all_reduce(totals)
    correct, loss = (totals / dataset.num_images).tolist()
    return correct, loss
