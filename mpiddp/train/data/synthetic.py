"""Random images with random labels, created on the device once, to measure the hardware without data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpiddp.train.data.dataset import Batch

POOL_BATCHES = 4


class SyntheticImages:
    """Standard normal images and uniform labels, different on every rank.

    Every request returns one of a pool of POOL_BATCHES batches. The number of the first image selects
    it, so a run that resumes in mid-epoch gets the same batches as an uninterrupted run.
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
        """Created at first use, after the sizes have been checked."""
        size = (
            POOL_BATCHES * self.batch_size + 1
        )  # the last batch of a tail may have one more image
        device = self._generator.device
        images = torch.randn(size, *self.shape, generator=self._generator, device=device)
        labels = torch.randint(self.num_classes, (size,), generator=self._generator, device=device)
        return images.contiguous(memory_format=self.memory_format), labels
