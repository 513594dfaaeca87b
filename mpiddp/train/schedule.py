"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

SCHEDULES = ("one-cycle", "cosine", "step", "constant")
REFERENCE_BATCH = 256  # images: the batch that --lr is meant for (Goyal et al. 2017, section 2.1)


def scaled_lr(lr: float, global_batch_size: int) -> float:
    """The linear scaling rule of Goyal et al.: k times the batch, k times the learning rate."""
    return lr * global_batch_size / REFERENCE_BATCH


def learning_rate(
    step: int, total_steps: int, *, peak: float, schedule: str, warmup_steps: int
) -> float:
    """The learning rate of a step in [0, total_steps).

    Linear warm-up from peak / warmup_steps, then: "one-cycle" falls linearly to zero (Smith & Topin
    2017, without the last, tiny phase), "cosine" along half a cosine to zero (Loshchilov & Hutter
    2016), "step" divides by 10 at 1/2, 3/4 and 7/8 of the way, "constant" stays.
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
