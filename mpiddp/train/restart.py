"""The same global batch after a restart on more or fewer ranks."""

from __future__ import annotations

from dataclasses import replace

from mpiddp.runtime.launcher.announcement import Announced
from mpiddp.train.options import TrainOptions

IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize


def keep_global_batch(
    options: TrainOptions, before: Announced | None, world_size: int
) -> TrainOptions:
    """The options as written, but with the global batch of an earlier attempt on other ranks.

    The number of backward passes grows until no pass is larger than before, because each rank has the
    same memory as before. Passes may become larger only where they would otherwise be single images,
    which BatchNorm cannot normalize.
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
