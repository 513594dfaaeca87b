"""The interface of every data set: an ordered stream of batches on the device.

The caller requests the images of a data set by number, so only `order` decides their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]  # float [N, C, H, W] normalized, int64 [N]


class Dataset(Protocol):
    """Labelled images, numbered from 0 to num_images - 1."""

    num_images: int

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        """Yield one batch for every tensor of `indices` (int64 [N], on the CPU), in their order.

        The randomness of a data set for training depends only on its seed, the epoch and the image's number,
        not on the rank or on earlier batches.
        """
        ...


@dataclass(frozen=True)
class Data:
    """A data set as opened by this rank. `test` is None if the data set has no test images.

    `digest` is the hash of the names and labels of an image folder's files.
    """

    name: str
    num_classes: int
    shape: tuple[int, int, int]  # C, H, W
    train: Dataset
    test: Dataset | None
    digest: str = ""

    @property
    def contents(self) -> str:
        """A description that must be equal on all ranks and in a resumed run, whatever the path."""
        test = self.test.num_images if self.test else 0
        names = f", names {self.digest}" if self.digest else ""
        return f"{self.train.num_images} + {test} images of {self.num_classes} classes{names}"
