"""Resolve the options of a training on one rank: its backend, its device and its configuration."""

from __future__ import annotations

import torch

from mpiddp.errors import UserError
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.launcher.announcement import announced
from mpiddp.runtime.torch.process_group import choose_backend, device_of
from mpiddp.train.config import TrainConfig, keep_global_batch, resolve_defaults
from mpiddp.train.engine import computes_in_bf16
from mpiddp.train.options import TrainOptions
from mpiddp.train.parallel import check_compression


def resolve_rank_config(
    options: TrainOptions | UserError, coordinator: Coordinator
) -> tuple[TrainConfig, str, torch.device]:
    """Return the configuration, the backend and the device of this rank. All ranks must call this.

    Args:
        options: those of the command line, or the error in them.

    Raises:
        SystemExit: a rank cannot use the options. Rank 0 has printed the error.
    """
    with coordinator.all_or_none():
        if isinstance(options, UserError):
            raise options
        backend = choose_backend(options.backend)
        device = device_of(coordinator.world, backend)
        options = keep_global_batch(options, announced(), coordinator.world.world_size)
        config = resolve_defaults(
            options,
            coordinator.world,
            on_gpu=device.type != "cpu",
            has_bf16=computes_in_bf16(device),
        )
        check_compression(config, device)
    return config, backend, device
