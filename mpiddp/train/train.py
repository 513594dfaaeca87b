"""Train a ResNet: the loop, its step, its evaluation, its saves. Read `fit` first, from top to bottom.

    step = fit(config, data, order, state, checkpoints, step=0, hooks=[Records(…)])

What only looks on is a `Hook`: records, logs, the comparison of ranks. `state` builds what a step changes,
`data` delivers the images, `order` says which.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import mpiddp
from mpiddp.train.config import Config
from mpiddp.train.data import Batch, Data, Dataset, batches
from mpiddp.train.folder import IGNORED
from mpiddp.train.measure import is_evaluated
from mpiddp.train.order import Order
from mpiddp.train.sharded import DTYPES, is_sharded
from mpiddp.train.state import State

REFERENCE_BATCH = 256  # images: the global batch of --lr (Goyal et al. 2017, section 2.1)
MAX_WARMUP_EPOCHS = 5
BATCH_PIXELS = 500 * 32 * 32  # of an evaluation batch, when the training batch is smaller


@dataclass(frozen=True)
class Step:
    """A step that was made."""

    number: int  # from 1 on, over all epochs
    epoch: int  # from 0 on
    lr: float
    loss_sum: Tensor  # of this rank's images: a scalar on the device
    ends_epoch: bool
    is_last: bool  # of the training


@dataclass(frozen=True)
class Score:
    """Of the model on all images for testing; of its average with --ema-decay."""

    accuracy: float  # the fraction of images that it classifies
    loss: float  # the mean cross-entropy


class Hook:
    """What looks on at a training. All ranks call the same methods in the same order."""

    def on_step(self, step: Step, *, saves: bool) -> None:
        """Called after every step, before its save, if it `saves`, and its evaluation."""

    def on_epoch(self, step: Step, score: Score | None) -> None:
        """Called after the last step of an epoch, with the score if it was evaluated."""

    def on_end(self, step: int, score: Score | None) -> None:
        """Called once after the last step, when its save is complete; not if the run was stopped."""


def fit(
    config: Config,
    data: Data,
    order: Order,
    state: State,
    checkpoints: mpiddp.Checkpoints,
    step: int,
    hooks: Sequence[Hook] = (),
) -> int:
    """Train from `step` to the end, or until a stop is requested, and save the last step. Returns it."""
    timer = state.timer
    score: Score | None = None
    for made in train(config, data, order, state, step):
        step = made.number
        # Before should_stop: due() is true at a stop too, and the stop is then one save, of this step.
        is_due = checkpoints.due(step) or (config.save_every is None and made.ends_epoch)
        stops = not made.is_last and (mpiddp.should_stop() or step == config.stop_at_step)
        saves = is_due or stops or made.is_last
        for hook in hooks:
            hook.on_step(made, saves=saves)

        if saves:  # before the evaluation: if a stop or a crash ends that, no step is lost
            timer.resume()
            save(checkpoints, state, step, config)
            timer.resume("save")
        if made.ends_epoch:
            if data.test is not None and is_evaluated(made.epoch, config):
                timer.resume()
                score = evaluate(state, data.test, config)
                timer.resume("evaluation")
            for hook in hooks:
                hook.on_epoch(made, score)
        if stops:
            checkpoints.close()  # waits for the save
            return step

    timer.resume()
    checkpoints.close()  # waits for the last save
    timer.resume("save")
    if score is None and data.test is not None:  # resumed after the last step
        score = evaluate(state, data.test, config)
    for hook in hooks:
        hook.on_end(step, score)
    return step


def train(config: Config, data: Data, order: Order, state: State, step: int) -> Iterator[Step]:
    """Make the steps after `step`, one for each iteration, to the end of the last epoch."""
    length = order.steps_per_epoch
    for epoch in range(step // length, config.epochs):
        steps = order.steps(epoch, first=step % length)
        images_of_epoch = batches(data.train, steps, config, epoch=epoch)
        state.timer.resume()
        while step < (epoch + 1) * length:
            lr = learning_rate(step, length, config)
            loss_sum = train_step(state, images_of_epoch, lr, config)
            average_statistics(state.model)
            step += 1
            if state.ema is not None and (step - 1) % config.ema_steps == 0:
                state.ema.update(state.model, ema_weight(step, length, config))
            state.timer.tick()
            ends_epoch, is_last = step % length == 0, step == length * config.epochs
            yield Step(step, epoch, lr, loss_sum, ends_epoch, is_last)


# --- what depends on the step alone ---


def learning_rate(step: int, steps_per_epoch: int, config: Config) -> float:
    """The learning rate of a step, a pure function: a checkpoint does not contain it.

    It scales with the batch (Goyal et al. 2017). It rises linearly in a quarter of the epochs, at most 5.
    Then "one-cycle" falls linearly to zero (Smith & Topin 2017, without the short last phase), "cosine" falls
    to zero along half a cosine (Loshchilov & Hutter 2016), "step" divides by 10 at 1/2, 3/4 and 7/8 of the
    remaining steps, and "constant" stays.
    """
    peak = config.lr * config.global_batch_size / REFERENCE_BATCH
    warmup = warmup_steps(steps_per_epoch, config)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps_per_epoch * config.epochs - warmup)
    if config.schedule == "one-cycle":
        return peak * (1 - progress)
    if config.schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "step":
        return float(peak * 0.1 ** sum(progress >= mark for mark in (1 / 2, 3 / 4, 7 / 8)))
    return peak


def warmup_steps(steps_per_epoch: int, config: Config) -> int:
    """The number of steps in which the learning rate rises."""
    return round(steps_per_epoch * min(MAX_WARMUP_EPOCHS, config.epochs / 4))


def ema_weight(step: int, steps_per_epoch: int, config: Config) -> float:
    """The weight of the model after this step in its average, a pure function as the learning rate is.

    As in torchvision's references: 1 in the warm-up, and afterwards --ema-decay is for one image between
    two updates of a training of one epoch. So the same value suits any batch, and any number of epochs.
    """
    if config.ema_decay is None or step <= warmup_steps(steps_per_epoch, config):
        return 1.0
    images = config.global_batch_size * config.ema_steps
    return min(1.0, (1 - config.ema_decay) * images / config.epochs)


# --- a step ---


def train_step(state: State, images_of_epoch: Iterator[Batch], lr: float, config: Config) -> Tensor:
    """One step of the optimizer over this rank's next batches, see `backward`. It leaves its gradients."""
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    loss_sum = backward(state, images_of_epoch, config)
    if config.clip_grad_norm is not None:  # the norm of all parameters, over all shards
        state.scaler.unscale_(state.optimizer)
        clip_grad_norm_(state.model.parameters(), config.clip_grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    return loss_sum


def backward(state: State, images_of_epoch: Iterator[Batch], config: Config) -> Tensor:
    """Compute the gradients of the mean loss over the step's global batch, equal on every rank.

    The timer's phases are "data", "forward", "backward", and "waiting" for the sum over all ranks. Shards
    and --sync-bn wait within the passes, and have no such phase. Returns the sum of the losses of this rank's
    images: a scalar on the device.
    """
    state.optimizer.zero_grad()
    loss_sum = torch.zeros((), device=next(state.model.parameters()).device)
    waits_last = not (is_sharded(state.ddp) or config.sync_bn)
    # The ranks take the mean of their gradients; this makes it the mean over all images.
    weight = dist.get_world_size() / config.global_batch_size
    for left in reversed(range(config.grad_accum_steps)):
        images, labels = next(images_of_epoch)
        state.timer.phase_ends("data")
        with _reducing(state.ddp, left == 0):
            with autocast(config, images.device):
                smoothing = config.label_smoothing
                logits = state.ddp(images)
                loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
            state.timer.phase_ends("forward")
            state.scaler.scale(loss * weight).backward()
            state.timer.phase_ends("waiting" if waits_last and left == 0 else "backward")
        loss_sum += loss.detach()
    return loss_sum


def time_passes(state: State, config: Config) -> dict[int, float]:
    """The seconds of a step's passes, for each size of images of the training. A collective.

    The model, its statistics and the timer stay as they are.
    """
    device, seconds = next(state.model.parameters()).device, dict[int, float]()
    buffers = [buffer.clone() for buffer in state.model.buffers()]
    for side in sorted({config.image_side(epoch) for epoch in range(config.epochs)}):
        images = torch.zeros(config.batch_size, 3, side, side, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        for _ in range(2):  # the first one allocates memory and selects kernels
            started = time.perf_counter()
            with autocast(config, device):
                loss = state.ddp(images).sum()
            loss.backward()
            loss.item()  # waits for the device
            seconds[side] = config.grad_accum_steps * (time.perf_counter() - started)
    torch._foreach_copy_(list(state.model.buffers()), buffers)
    state.optimizer.zero_grad()
    state.timer.forget()
    return seconds


def _reducing(model: nn.Module, reduces: bool) -> Any:
    """The context of a forward and a backward pass, which reduces the gradients over the ranks or not."""
    if is_sharded(model):
        model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
        model.set_is_last_backward(reduces)  # type: ignore[operator]
    elif not reduces and dist.get_world_size() > 1:
        return model.no_sync()  # type: ignore[operator]
    return contextlib.nullcontext()


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """The autocast of --amp. A sharded model has its own policy instead, see `sharded`."""
    enabled = config.amp != "off" and config.parallel == "ddp"
    return torch.autocast(device.type, dtype=DTYPES.get(config.amp), enabled=enabled)


def average_statistics(model: nn.Module) -> None:
    """Average BatchNorm's running statistics, so that all ranks have the same model. A collective.

    A step computes with the statistics of its own images, so the training does not depend on this.
    """
    own = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not own or dist.get_world_size() == 1:
        return
    total = torch.cat([buffer.reshape(-1) for buffer in own])
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).split([buffer.numel() for buffer in own])
    # One kernel for all of them, as torch's optimizers update parameters.
    torch._foreach_copy_(own, [mean.view_as(to) for to, mean in zip(own, means, strict=True)])


# --- evaluation ---


@torch.no_grad()
def evaluate(state: State, dataset: Dataset, config: Config) -> Score:
    """Score the model, or its average, on all images of the data set. A collective: every rank must call it.

    Each image counts on exactly one rank, and the ranks add sums, not means. The batch size does not change
    the result, because BatchNorm uses its running statistics. All ranks have as many batches, of one size:
    each pass of a sharded model needs all ranks, and a compiled one is compiled for each size.
    """
    model, rank, world_size = state.model, dist.get_rank(), dist.get_world_size()
    share = math.ceil(dataset.num_images / world_size)
    num_batches = math.ceil(share / max(config.batch_size, BATCH_PIXELS // config.image_size**2))
    size = math.ceil(share / num_batches)
    first, end = (dataset.num_images * each // world_size for each in (rank, rank + 1))
    numbers = torch.arange(first, first + num_batches * size)
    # Those beyond the share fill the last batch, and do not count.
    beyond = (numbers >= end).to(dataset.device).split(size)
    numbers = numbers.clamp(max=dataset.num_images - 1)
    totals = torch.zeros(3, dtype=torch.float64, device=dataset.device)  # correct, loss, images
    with state.ema.lent_to(model) if state.ema else contextlib.nullcontext():
        model.eval()
        with autocast(config, dataset.device):
            found = dataset.batches(numbers.split(size), epoch=0)
            for (images, labels), others in zip(found, beyond, strict=True):
                labels = labels.masked_fill(others, IGNORED)
                logits = state.scored(images)
                totals[0] += (logits.argmax(1) == labels).sum()
                totals[1] += F.cross_entropy(logits.float(), labels, reduction="sum")
                totals[2] += (labels != IGNORED).sum()
        model.train()
        for module in model.modules():
            if is_sharded(module):  # free what a forward pass without a backward pass has gathered
                module.reshard()  # type: ignore[operator]
    dist.all_reduce(totals)
    return Score(*(totals[:2] / totals[2]).tolist())


# --- checkpoints ---


def save(checkpoints: mpiddp.Checkpoints, state: State, step: int, config: Config) -> None:
    """Start to save the checkpoint of this step. A collective: every rank must call it.

    Any program can load the model, because it is the bare one. The learning rate and the order of the images
    are functions of the step.
    """
    saved = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
    }
    if state.ema is not None:
        saved["ema"] = state.ema.state_dict()
    checkpoints.save(step, saved)


def resume(saved: mpiddp.Resumed | None, state: State, config: Config) -> int:
    """Restore this checkpoint, and return the number of steps that it has made; 0 without one.

    A job with another number of ranks has freshly seeded generators.
    """
    if saved is not None:
        load(saved, state)
        if saved.world_size == dist.get_world_size():
            return saved.step
    seed = config.seed + 1 + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # numpy's largest
    return saved.step if saved else 0


def load(saved: mpiddp.Resumed, state: State) -> None:
    """Load the model, the optimizer and the scaler, with the settings of this version of the program.

    An average that the saved run has not had begins as a copy of the model.
    """
    optimizer = state.optimizer
    settings = [{**group} for group in optimizer.param_groups]
    saved.load_into(model=state.model, optimizer=optimizer)
    if state.ema is not None and "ema" in saved.state:
        saved.load_into(ema=state.ema)
    elif state.ema is not None:
        state.ema.load_state_dict(state.model.state_dict())
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    # The fused kernels read a parameter and its momentum element by element in memory order, and the
    # saved run may have had another layout.
    for parameter, held in optimizer.state.items():
        if held.get("momentum_buffer") is not None:
            held["momentum_buffer"] = torch.empty_like(parameter).copy_(held["momentum_buffer"])
    if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
        state.scaler.load_state_dict(saved.state["scaler"])
