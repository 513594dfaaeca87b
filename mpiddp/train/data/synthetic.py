"""Random images with random labels, made on the device once: what the hardware can do without data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpiddp.train.data.source import Batch

POOL_BATCHES = 4


class SyntheticImages:
    """Standard normal images and uniform labels; other ones on every rank.

    Whatever images are asked for, one of a pool of POOL_BATCHES batches is delivered. The number of
    the first image says which, so that a run that resumes in mid-epoch sees what it would have seen.
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
        self.num_classes = num_classes
        self.shape = shape
        self.batch_size = batch_size
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._generator = torch.Generator(device).manual_seed(seed * 1_000_003 + rank)

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        images, labels = self._pool
        for numbers in indices:
            start = int(numbers[0]) % POOL_BATCHES * self.batch_size
            end = start + len(numbers)
            yield images[start:end], labels[start:end]

    @functools.cached_property
    def _pool(self) -> Batch:
        """Made when first used: by then the sizes have been found to make sense."""
        size = POOL_BATCHES * self.batch_size + 1  # a tail's last batch may hold one image more
        device = self._generator.device
        images = torch.randn(size, *self.shape, generator=self._generator, device=device)
        labels = torch.randint(self.num_classes, (size,), generator=self._generator, device=device)
        return images.contiguous(memory_format=self.memory_format), labels
