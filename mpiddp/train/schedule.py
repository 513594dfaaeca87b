"""The learning rate as a pure function of the step, so a checkpoint does not contain it."""

from __future__ import annotations

import math

SCHEDULES = ("one-cycle", "cosine", "step", "constant")
REFERENCE_BATCH = 256  # images: the global batch of --lr (Goyal et al. 2017, section 2.1)


def scaled_lr(lr: float, global_batch_size: int) -> float:
    """The linear scaling rule of Goyal et al.: k times the batch, k times the learning rate."""
    return lr * global_batch_size / REFERENCE_BATCH


def learning_rate(
    step: int, total_steps: int, *, peak: float, schedule: str, warmup_steps: int
) -> float:
    """The learning rate of a step in [0, total_steps).

    The rate rises linearly from peak / warmup_steps. Then "one-cycle" falls linearly to zero (Smith &
    Topin 2017, without the short last phase), "cosine" falls to zero along half a cosine (Loshchilov &
    Hutter 2016), "step" divides by 10 at 1/2, 3/4 and 7/8 of the remaining steps, and "constant" stays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "one-cycle":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    if schedule == "step":
        return float(peak * 0.1 ** sum(progress >= mark for mark in (1 / 2, 3 / 4, 7 / 8)))
    return peak
