"""What `mpiddp train` saves with `mpiddp.Checkpoints`, and how it resumes.

    model.pt       the bare model's state_dict with averaged BatchNorm statistics; any program can load it
    optimizer.pt   its momentum
    scaler.pt      the gradient scaler of fp16
    training.pt    epoch, position in the epoch, options, contents of the data set
    ranks.pt       each rank's own BatchNorm statistics, beside its random number generators

The learning rate and the order of the images are functions of step, epoch and position.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch

from mpiddp.checkpoints.contents import Resumed
from mpiddp.checkpoints.ranks import PATIENCE_S
from mpiddp.checkpoints.script import Checkpoints
from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.train.config import TrainConfig, changed_options
from mpiddp.train.engine import TrainState, averaged_buffers, restore_buffers

_LARGEST_SEED = 1 << 32  # of numpy's generator


@dataclass(frozen=True)
class Progress:
    """How far the training has come."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    position: int = 0  # images of the current epoch done


def open_checkpoints(folder: Path, config: TrainConfig) -> Checkpoints:
    """The checkpoints of the run in `folder`. All ranks must call this."""
    return Checkpoints(
        folder,
        keep=config.keep,
        every=config.save_every,
        config={"program": "mpiddp train"},
        on_save_error=cast(Literal["warn", "stop"], config.on_save_error),
        timeout_s=max(config.timeout, PATIENCE_S),
    )


def save(
    checkpoints: Checkpoints, state: TrainState, progress: Progress, config: TrainConfig, data: str
) -> None:
    """Start to save the checkpoint of this step. A collective: every rank must call it.

    Args:
        data: the contents of the data set, see `Data`.

    Raises:
        JobFailed: the previous save has failed, and --on-save-error is stop.
    """
    with averaged_buffers(state.model) as own:
        checkpoints.save(
            progress.step,
            {
                "model": state.model.state_dict(),
                "optimizer": state.optimizer.state_dict(),
                "scaler": state.scaler.state_dict(),
                "training": {
                    "epoch": progress.epoch,
                    "position": progress.position,
                    "options": config.as_json(),
                    "data": data,
                },
            },
            per_rank={"buffers": own},
        )


def resume(
    checkpoints: Checkpoints,
    state: TrainState,
    config: TrainConfig,
    data: str,
    coordinator: Coordinator,
) -> Progress:
    """Open the run's folder, and restore the newest checkpoint, or that of --resume. A collective.

    A job with another number of ranks keeps the averaged statistics and freshly seeded generators.

    Raises:
        UserError: there is no such checkpoint, or it is of other options or other data.
        JobFailed: a disk has failed.
    """
    rank, world_size = coordinator.world.rank, coordinator.world.world_size
    _seed(config.seed + 1 + rank)
    path = None if config.resume in ("auto", "never") else config.resume
    saved = checkpoints.resume(path, check=lambda saved: _refuse_changes(saved, config, data))
    if saved is None:
        return Progress()
    with coordinator.all_or_none():
        _restore(state, saved)
    if saved.world_size == world_size:
        own = saved.per_rank["buffers"]
        if isinstance(own, list):  # an earlier version wrote each, and the counts of batches too
            own = torch.cat([each.reshape(-1) for each in own if each.is_floating_point()])
        restore_buffers(state.model, own)
    else:
        _seed(config.seed + 1 + rank)
    training = saved.state["training"]
    return Progress(saved.step, training["epoch"], training["position"])


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _LARGEST_SEED)


def _refuse_changes(saved: Resumed, config: TrainConfig, data: str) -> None:
    """Raise UserError for options or data that would change what the past steps have done."""
    training = saved.state.get("training", {})
    changes = changed_options(training.get("options", {}), config)
    anew = "or start a new run from its weights: --out OTHER --weights …/model.pt"
    if refused := [str(change) for change in changes if change.refusal]:
        raise UserError(
            f"the checkpoint of step {saved.step} was made with other options: {'; '.join(refused)}. "
            f"Use the same options, {anew}"
        )
    saved_data = training.get("data") or data  # version 0.1.0 did not write it
    if saved_data != data:
        raise UserError(
            f"the checkpoint of step {saved.step} was made with other data: {saved_data}; the data is now "
            f"{data}. Use the same --data-dir, {anew}"
        )
    if changes:
        log.info(
            f"resuming with other options: {'; '.join(map(str, changes))}. The learning rate of each step "
            "is now that of a run that has had them from its start."
        )


def _restore(state: TrainState, saved: Resumed) -> None:
    """Load the state, with this run's settings: the saved run may have had another --momentum."""
    optimizer = state.optimizer
    settings = [{**group} for group in optimizer.param_groups]
    saved.load_into(model=state.model, optimizer=optimizer)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    align_momentum(optimizer)
    if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
        state.scaler.load_state_dict(saved.state["scaler"])


def align_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Bring the momentum into the memory layout of the parameters; the saved run may have had another.

    The fused kernels read a parameter and its momentum element by element in memory order.
    """
    for parameter, held in optimizer.state.items():
        momentum = held.get("momentum_buffer")
        if momentum is not None:
            held["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)


@contextlib.contextmanager
def exiting_together(coordinator: Coordinator) -> Iterator[None]:
    """Exit on all ranks together after a failed save, which all ranks raise. Rank 0 prints the error."""
    try:
        yield
    except JobFailed:
        with coordinator.all_or_none():
            raise
