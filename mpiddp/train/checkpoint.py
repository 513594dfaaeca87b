"""What `mpiddp train` saves with `mpiddp.Checkpoints`, and how it resumes.

    model.pt       the bare model's state_dict with averaged BatchNorm statistics; any program can load it
    optimizer.pt   its momentum
    scaler.pt      the gradient scaler of fp16
    training.pt    the options
    ranks.pt       each rank's own BatchNorm statistics, beside its random number generators

The learning rate and the order of the images are functions of the step.
"""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import mpiddp
from mpiddp.train.config import noted_changes
from mpiddp.train.options import FIXED
from mpiddp.train.step import State, averaged_buffers, restore_buffers

_LARGEST_SEED = 1 << 32  # of numpy's generator
log = logging.getLogger("mpiddp")


def open_checkpoints(folder: Path, config: Namespace, data: str) -> mpiddp.Checkpoints:
    """Those of the run in `folder`. They refuse a resume with other FIXED options or other data."""
    fixed = {f"--{name.replace('_', '-')}": getattr(config, name) for name in FIXED}
    settings = {"program": "mpiddp train", "data": data, **fixed}
    return mpiddp.Checkpoints(folder, keep=config.keep, every=config.save_every, config=settings)


def save(checkpoints: mpiddp.Checkpoints, state: State, step: int, config: Namespace) -> None:
    """Start to save the checkpoint of this step. A collective: every rank must call it."""
    with averaged_buffers(state.model) as own:
        checkpoints.save(
            step,
            {
                "model": state.model.state_dict(),
                "optimizer": state.optimizer.state_dict(),
                "scaler": state.scaler.state_dict(),
                "training": {"options": vars(config)},
            },
            per_rank={"buffers": own},
        )


def resume(checkpoints: mpiddp.Checkpoints, state: State, config: Namespace) -> int:
    """Open the run's folder, and restore the newest checkpoint, or that of --resume. A collective.

    A job with another number of ranks keeps the averaged statistics and freshly seeded generators. Returns
    the number of steps that it has made; 0 without a checkpoint.
    """
    own_seed = config.seed + 1 + dist.get_rank()
    _seed(own_seed)
    saved = checkpoints.resume(None if config.resume in ("auto", "never") else config.resume)
    if saved is None:
        return 0
    if changes := noted_changes(saved.state["training"]["options"], config):
        log.info(
            f"resuming with other options: {'; '.join(changes)}. The learning rate of each step is now "
            "that of a run that has had them from its start."
        )
    _restore(state, saved)
    if saved.world_size == dist.get_world_size():
        restore_buffers(state.model, saved.per_rank["buffers"])
    else:
        _seed(own_seed)
    return saved.step


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _LARGEST_SEED)


def _restore(state: State, saved: mpiddp.Resumed) -> None:
    """Load the state, with the settings of this version of the program."""
    optimizer = state.optimizer
    settings = [{**group} for group in optimizer.param_groups]
    saved.load_into(model=state.model, optimizer=optimizer)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    # The fused kernels read a parameter and its momentum element by element in memory order, and the
    # saved run may have had another layout.
    for parameter, held in optimizer.state.items():
        if held.get("momentum_buffer") is not None:
            held["momentum_buffer"] = torch.empty_like(parameter).copy_(held["momentum_buffer"])
    if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
        state.scaler.load_state_dict(saved.state["scaler"])
