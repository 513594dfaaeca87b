"""The same global batch after a restart on more or fewer ranks."""

from __future__ import annotations

from dataclasses import replace

from mpiddp.runtime.announcement import Announced
from mpiddp.train.options import TrainOptions

IMAGES_PER_PASS = 2  # the least that BatchNorm can normalize


def keep_global_batch(
    options: TrainOptions, before: Announced | None, world_size: int
) -> TrainOptions:
    """The options as written, but with the global batch of an earlier attempt on other ranks.

    In as many backward passes as it takes for none to be larger than before: each rank has the memory
    that it had. Rather larger passes than single images, which BatchNorm cannot normalize.
    """
    if before is None or before.world_size == world_size:
        return options
    images = before.global_batch_size
    per_pass = -(-images // (options.grad_accum_steps * before.world_size))
    passes = -(-images // (per_pass * world_size))
    passes = max(1, min(passes, images // (IMAGES_PER_PASS * world_size)))
    return replace(
        options,
        batch_size=None,
        global_batch_size=images,
        uneven=True,
        grad_accum_steps=passes,
    )
