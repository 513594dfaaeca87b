"""What every data set looks like to the loop: an ordered stream of batches that are on the device.

A source is told which images to deliver, so the order of training belongs to `sharding` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]  # float [N, C, H, W] normalized, int64 [N]


class Source(Protocol):
    """Labelled images, numbered from 0 to num_images - 1."""

    num_images: int

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        """One batch for every tensor of `indices` (int64 [N], on the CPU), in their order.

        What is random in a training source follows from its seed, the epoch and the image's number
        alone: neither the rank nor what was delivered before changes it.
        """
        ...


@dataclass(frozen=True)
class Data:
    """A data set as this rank sees it. `test` is None where there is none to be had.

    `digest` is of the names and labels of its files, where the data set is a folder.
    """

    name: str
    num_classes: int
    shape: tuple[int, int, int]  # C, H, W
    train: Source
    test: Source | None
    digest: str = ""

    @property
    def contents(self) -> str:
        """What all ranks must have alike, and a resumed run again, wherever each of them keeps it."""
        test = self.test.num_images if self.test else 0
        names = f", names {self.digest}" if self.digest else ""
        return f"{self.train.num_images} + {test} images of {self.num_classes} classes{names}"
