"""The parts of a step: the model, the optimizer, one backward pass over a batch."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mpiddp.checkpoints.state import Unreadable, load_tensors
from mpiddp.errors import UserError
from mpiddp.paths import cause_of
from mpiddp.train.architectures import stem_of
from mpiddp.train.config import TrainConfig
from mpiddp.train.data.dataset import Batch, Data
from mpiddp.train.data.low_resolution import low_resolution
from mpiddp.train.muon import Muon
from mpiddp.train.order import Step
from mpiddp.train.parallel import is_sharded, reducing
from mpiddp.train.resnet import ARCHS
from mpiddp.train.sync_batch_norm import synchronized


@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: the model, its optimizer and the gradient scaler of fp16."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def build_model(config: TrainConfig, data: Data) -> nn.Module:
    """The bare model on the CPU, the same on every rank.

    Raises:
        UserError: --weights names a file that does not fit, or the batches are too small for BatchNorm.
    """
    channels, height, _ = data.shape
    stem = stem_of(config.arch, config.stem, height)
    torch.manual_seed(config.seed)
    model: nn.Module = ARCHS[config.arch](
        num_classes=data.num_classes, stem=stem, in_channels=channels
    )
    if config.weights is not None:
        load_weights(model, Path(config.weights))
    images_of_pass = config.batch_size
    if config.sync_bn:  # those of all ranks count
        images_of_pass = config.global_batch_size // config.grad_accum_steps
    if images_of_pass == 1:
        _check_lone_image(model, data.shape)
        if config.low_res_epochs:
            _check_lone_image(model, (channels, *low_resolution(*data.shape[1:])))
    return model


def _check_lone_image(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """Raise UserError if BatchNorm would get one pixel of one image, whose variance is 0."""
    try:  # a forward pass over shapes only
        copy.deepcopy(model).to("meta")(torch.empty(1, *shape, device="meta"))
    except ValueError:
        _, height, width = shape
        raise UserError(
            f"BatchNorm cannot normalize a pass of one {height}×{width} image. "
            "Use --batch-size 2 or more, or --stem cifar."
        ) from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a torchvision state_dict, except a last layer for another number of classes.

    Raises:
        UserError: no such file, not a state_dict, or one of another architecture.
        JobFailed: a disk has failed.
    """
    try:
        weights = load_tensors(path)
    except OSError as error:
        sentence = f"--weights {path}: {error.strerror} (looked in {Path.cwd()})."
        raise cause_of(error)(sentence) from None
    except Unreadable as error:
        raise UserError(f"--weights {path}: {error}. Expected a state_dict.") from None
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise UserError(f"--weights {path}: expected a state_dict, a dict of tensors by name.")
    own = model.state_dict()
    if unknown := [key for key in weights if key not in own]:
        raise UserError(f"--weights {path}: {unknown[0]} is not part of this model. Check --arch.")
    body = {
        key: value
        for key, value in weights.items()
        if not key.startswith("fc.") or value.shape == own[key].shape
    }
    if mismatches := [key for key, value in body.items() if value.shape != own[key].shape]:
        found, expected = (list(tensors[mismatches[0]].shape) for tensors in (body, own))
        raise UserError(
            f"--weights {path}: {mismatches[0]} has shape {found}; expected {expected}. "
            "Check --arch and --stem."
        )
    optional = ("fc.weight", "fc.bias")
    for key in own:  # torchvision's oldest files have no num_batches_tracked
        if key not in weights and key not in optional and not key.endswith("num_batches_tracked"):
            raise UserError(f"--weights {path}: {key} is missing. Check --arch.")
    model.load_state_dict(body, strict=False)


def to_device(model: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """Move the model to the device, with its convolutions in the memory layout of the images.

    With --sync-bn its BatchNorm is that of the device over all ranks.
    """
    if config.sync_bn:
        model = synchronized(model, device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(device, memory_format=layout)  # type: ignore[call-overload, no-any-return]


def choose_kernels(config: TrainConfig) -> None:
    """Select the fastest kernel that cuDNN finds for each shape, or with --deterministic reproducible ones.

    With --deterministic, an operation without a reproducible kernel raises. Call this before the first
    operation on a GPU, because cuBLAS reads its variable once.
    """
    if not config.deterministic:
        torch.backends.cudnn.benchmark = True
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """That of --optimizer. Weight decay is on convolutions and the last layer's matrix only.

    Muon leaves the first convolution, whose filters are few and small, to SGD.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # BatchNorm and biases
    if config.optimizer == "muon":
        hidden = [p for p in matrices[1:] if p.ndim == 4]
        ends = [p for p in matrices if not any(p is each for each in hidden)]
        decayed = {"params": ends, "weight_decay": config.weight_decay}
        others = (decayed, {"params": vectors, "weight_decay": 0.0})
        return Muon(hidden, others, lr=config.lr, momentum=config.momentum)
    optimizer = torch.optim.SGD(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        fused=not is_sharded(model),
        foreach=is_sharded(model),  # torch has no fused SGD for shards
    )
    if config.amp == "fp16" and config.momentum:
        # If fp16 overflows at the very first step, torch 2.13's fused SGD skips the step but keeps the
        # uninitialized momentum that it has allocated. Zeros give the same first step.
        for parameter in (*matrices, *vectors):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler:
    """The gradient scaler. It passes gradients through unscaled unless --amp is fp16."""
    return torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")


def _untimed(phase: str) -> None:
    """Nobody wants to know when a phase ends."""


def train_step(
    state: TrainState,
    ddp: nn.Module,
    batches: Iterator[Batch],
    step: Step,
    lr: float,
    config: TrainConfig,
    *,
    phase_ends: Callable[[str], object] = _untimed,
) -> Tensor:
    """One step of the optimizer over the next batches of this rank. It leaves its gradients.

    Args:
        phase_ends: as for `backward`. The rest of the step is the phase "optimizer".

    Returns:
        The sum of the losses of this rank's images: a scalar on the device.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    loss_sum = backward(ddp, batches, step, state.scaler, config, phase_ends=phase_ends)
    if config.clip_grad_norm is not None:
        clip_gradients(state, config.clip_grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    return loss_sum


def backward(
    ddp: nn.Module,
    batches: Iterator[Batch],
    step: Step,
    scaler: torch.amp.GradScaler,
    config: TrainConfig,
    *,
    phase_ends: Callable[[str], object] = _untimed,
) -> Tensor:
    """Compute the gradients of the mean loss over the step's global batch, equal on every rank.

    Args:
        phase_ends: called at the end of each phase: "data", "forward", "backward", and "waiting" for the sum
            over all ranks. Shards and --sync-bn wait within the passes, and have no such phase.

    Returns:
        The sum of the losses of this rank's images: a scalar on the device.
    """
    world_size = dist.get_world_size()
    loss_sum = torch.zeros((), device=next(ddp.parameters()).device)
    averages = step.ddp_averages or is_sharded(ddp)
    num_counted = len(step.micro_batches) - step.num_discarded
    waits_last = not (is_sharded(ddp) or config.sync_bn)
    for index, _ in enumerate(step.micro_batches):
        images, labels = next(batches)
        phase_ends("data")
        is_last = index == len(step.micro_batches) - 1
        counts = index < num_counted
        kept = contextlib.nullcontext() if counts else unchanged_buffers(ddp)
        with kept, reducing(ddp, averages and is_last):
            with autocast(config, images.device):
                logits = ddp(images)
                loss = F.cross_entropy(
                    logits, labels, reduction="sum", label_smoothing=config.label_smoothing
                )
            phase_ends("forward")
            # The ranks take the mean of their gradients; this makes it the mean over all images.
            weight = world_size / step.num_images if counts else 0.0
            scaler.scale(loss * weight).backward()
            phase_ends("waiting" if waits_last and is_last else "backward")
        if counts:
            loss_sum += loss.detach()
    if not averages:
        scaler.scale(loss_sum)  # creates the scale at first use, even on a rank without images
        _average_gradients([p for p in ddp.parameters() if p.requires_grad])
        phase_ends("waiting" if waits_last else "backward")
    return loss_sum


def mark_last_gradient(model: nn.Module, phase_ends: Callable[[str], object]) -> None:
    """Let "backward" end with the gradient of the first parameter. Then DDP waits for the other ranks."""
    first = next((p for p in model.parameters() if p.requires_grad), None)
    if first is not None and not is_sharded(model):
        first.register_post_accumulate_grad_hook(lambda parameter: phase_ends("backward"))


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average as DDP does, for a last batch in which some ranks have fewer images or none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(
        gradients,
        flat.split([g.numel() for g in gradients]),
        strict=True,
    ):
        gradient.copy_(mean.view_as(gradient))


def clip_gradients(state: TrainState, max_norm: float) -> None:
    """Scale the gradients down to this norm over all parameters, of all shards. A collective if sharded."""
    state.scaler.unscale_(state.optimizer)
    parameters = [p for p in state.model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # a DTensor: each rank has the norm of its shards
        norm = norm.full_tensor()
    clip_grads_with_norm_(parameters, max_norm, norm)


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The autocast of --amp. A sharded model has its own policy instead, see `fully_sharded.shard`."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}[config.amp]
    enabled = config.amp != "off" and config.parallel == "ddp"
    return torch.autocast(device.type, dtype=dtype, enabled=enabled)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether bf16 is faster than fp32 on the device, not only possible."""
    if device.type == "cuda":
        with torch.cuda.device(
            device
        ):  # it asks about the current device, which may be another GPU
            supported: bool = torch.cuda.is_bf16_supported(including_emulation=False)
        return supported
    if device.type != "cpu":
        return bool(torch.get_device_module(device).is_bf16_supported())
    # On x86, oneDNN emulates bf16 on every CPU with AVX-512, so read the CPU's flags instead.
    with Path("/proc/cpuinfo").open() as lines:  # on Arm the line is "Features", the flag "bf16"
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not {"avx512_bf16", "bf16"}.isdisjoint(flags.split())


@contextlib.contextmanager
def averaged_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Average BatchNorm's running statistics over the ranks while the body runs, then restore them.

    All ranks evaluate and save the same model, and the training that follows does not change.
    A collective: every rank must enter. Gives the body this rank's own statistics, for `restore_buffers`.
    """
    own = torch.cat([buffer.reshape(-1) for buffer in _statistics(model)])
    mean = own.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    restore_buffers(model, mean)
    try:
        yield own
    finally:
        restore_buffers(model, own)


def restore_buffers(model: nn.Module, own: Tensor) -> None:
    """Give the model the statistics that `averaged_buffers` has given: one after another, [elements]."""
    buffers = _statistics(model)
    sizes = [buffer.numel() for buffer in buffers]
    for buffer, values in zip(buffers, own.split(sizes), strict=True):
        buffer.copy_(values.view_as(buffer))


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that matter and differ from rank to rank: BatchNorm does not use its count of batches."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after the body: BatchNorm's statistics."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in saved:
            buffer.copy_(before)
