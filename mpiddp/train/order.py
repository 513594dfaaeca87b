"""The images of each rank at each step: one permutation per epoch, cut into global batches.

Step k takes the slice [k·G, (k+1)·G) of the permutation, where G is the global batch, and splits it
over the ranks. So each image occurs at most once per epoch, the order does not depend on the number of
ranks, and a resume only needs the position within the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank sees it."""

    micro_batches: tuple[Tensor, ...]  # int64 [≤ batch_size] each: indices of images
    num_images: int  # over all ranks
    ddp_averages: bool  # every rank has the same number of micro-batches, so DDP can average
    num_discarded: int = 0  # micro-batches at the end that do not count


@dataclass(frozen=True)
class Order:
    """The split of an epoch of `num_samples` images over `world_size` ranks.

    Each rank gets its share of a global batch in `grad_accum_steps` micro-batches. If the division
    leaves a remainder, some micro-batches have one image less. With `keep_tail` the remaining images of
    the epoch form a last, smaller step; otherwise they are dropped.

    With `equal_passes`, a rank that has fewer micro-batches than others in that step repeats two images, and
    discards what it computes from them: each pass of a sharded model needs all ranks.
    """

    num_samples: int
    global_batch_size: int
    grad_accum_steps: int
    rank: int
    world_size: int
    seed: int
    keep_tail: bool = False
    max_steps: int | None = None
    equal_passes: bool = False

    @property
    def batch_size(self) -> int:
        """Images of the largest micro-batch."""
        return -(-self.global_batch_size // (self.grad_accum_steps * self.world_size))

    @property
    def steps_per_epoch(self) -> int:
        steps, tail = divmod(self.num_samples, self.global_batch_size)
        # BatchNorm cannot normalize a single image once the feature map has shrunk to one pixel.
        steps += self.keep_tail and tail > 1
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def permutation(self, epoch: int) -> Tensor:
        """The permutation of this epoch, the same on every rank: int64 [num_samples]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def steps(self, epoch: int, position: int = 0) -> Iterator[Step]:
        """The steps of an epoch from `position` on: a number of images, a multiple of the batch."""
        permutation = self.permutation(epoch)
        end = min(self.num_samples, self.steps_per_epoch * self.global_batch_size)
        for start in range(position, end, self.global_batch_size):
            yield self._split(permutation[start : min(start + self.global_batch_size, end)])

    def _split(self, images: Tensor) -> Step:
        """Split a global batch into contiguous shares. In a tail, as many ranks as possible get a full one.

        The last micro-batch of a tail never contains a single image (see steps_per_epoch): the
        micro-batch before it takes that image over.
        """
        if len(images) == self.global_batch_size:
            share = torch.tensor_split(images, self.world_size)[self.rank]
            return Step(torch.tensor_split(share, self.grad_accum_steps), len(images), True)
        per_rank = self.batch_size * self.grad_accum_steps
        pieces = [
            piece
            for share in torch.split(images, per_rank)
            for piece in torch.split(share, self.batch_size)
        ]
        if len(pieces) > 1 and len(pieces[-1]) == 1 < self.batch_size:
            pieces[-2:] = [torch.cat(pieces[-2:])]
        first = self.rank * self.grad_accum_steps
        own = tuple(pieces[first : first + self.grad_accum_steps])
        most = min(self.grad_accum_steps, len(pieces))  # of rank 0
        num_discarded = most - len(own) if self.equal_passes else 0
        return Step((*own, *[images[:2]] * num_discarded), len(images), False, num_discarded)


def share_of(num_samples: int, rank: int, world_size: int) -> range:
    """The images that a rank evaluates. Each image is on exactly one rank; shares differ by at most one."""
    return range(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)
