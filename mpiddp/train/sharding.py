"""Which images a rank trains on at which step: one permutation per epoch, cut into global batches.

Step k takes the slice [k·G, (k+1)·G) of the permutation, G being the global batch, and deals it to
the ranks. So no image is seen twice in an epoch, the order does not depend on the number of ranks,
and a position within the epoch is all that a resume needs.
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
    ddp_averages: bool  # every rank has as many micro-batches, so that DDP can do the averaging


@dataclass(frozen=True)
class Shards:
    """How an epoch of `num_samples` images is dealt to `world_size` ranks.

    Every rank gets its share of a global batch in `grad_accum_steps` micro-batches. Where it does not
    divide, some hold one image less. `keep_tail` makes a last, smaller step of what is left of the
    epoch; else it is dropped.
    """

    num_samples: int
    global_batch_size: int
    grad_accum_steps: int
    rank: int
    world_size: int
    seed: int
    keep_tail: bool = False
    max_steps: int | None = None

    @property
    def batch_size(self) -> int:
        """Images of the largest micro-batch."""
        return -(-self.global_batch_size // (self.grad_accum_steps * self.world_size))

    @property
    def steps_per_epoch(self) -> int:
        steps, tail = divmod(self.num_samples, self.global_batch_size)
        # A lone image cannot be batch-normalized where the feature map has shrunk to one pixel.
        steps += self.keep_tail and tail > 1
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def order(self, epoch: int) -> Tensor:
        """The permutation of this epoch, the same on every rank: int64 [num_samples]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def steps(self, epoch: int, position: int = 0) -> Iterator[Step]:
        """The steps of an epoch from `position` on, a number of images: a multiple of the batch."""
        order = self.order(epoch)
        end = min(self.num_samples, self.steps_per_epoch * self.global_batch_size)
        for start in range(position, end, self.global_batch_size):
            yield self._deal(order[start : min(start + self.global_batch_size, end)])

    def _deal(self, images: Tensor) -> Step:
        """Deal a global batch in contiguous shares; of a tail, as many ranks as possible get a full one.

        A rank's last micro-batch of a tail never holds one image alone (see steps_per_epoch): its
        neighbour takes it over.
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
        mine = tuple(pieces[first : first + self.grad_accum_steps])
        return Step(mine, len(images), False)


def share_of(num_samples: int, rank: int, world_size: int) -> range:
    """The images that a rank evaluates: every image on exactly one rank, shares differing by one."""
    return range(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)
