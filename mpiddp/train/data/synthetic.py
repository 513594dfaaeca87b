"""Random images with random labels, made on the device once: what the hardware can do without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpiddp.train.data.source import Batch

POOL_BATCHES = 4


class SyntheticImages:
    """Standard normal images and uniform labels; other ones on every rank.

    A pool of POOL_BATCHES batches is dealt out in turn, whatever numbers are asked for.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_images: int,
        num_classes: int,
        shape: tuple[int, int, int],
        batch_size: int,
        seed: int,
        rank: int,
        channels_last: bool = True,
    ) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + rank)
        pool = POOL_BATCHES * batch_size
        images = torch.randn(pool, *shape, generator=generator, device=device)
        self._images = images.contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )
        self._labels = torch.randint(num_classes, (pool,), generator=generator, device=device)

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        for turn, numbers in enumerate(indices):
            start = turn % POOL_BATCHES * self.batch_size
            end = start + len(numbers)
            yield self._images[start:end], self._labels[start:end]
