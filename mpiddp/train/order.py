"""The images of each rank at each step: one permutation per epoch, cut into global batches.

Step k takes the slice [k·G, (k+1)·G) of the permutation, where G is the global batch, and splits it
over the ranks. So each image occurs at most once per epoch, the order does not depend on the number of
ranks, and a resume needs only the number of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """The split of an epoch of `num_samples` images over `world_size` ranks.

    Each rank gets its share of a global batch in `grad_accum_steps` micro-batches. If the division leaves a
    remainder, some micro-batches have one image less. The images after the last whole global batch of an
    epoch are dropped; the next epoch has another permutation.
    """

    num_samples: int
    global_batch_size: int
    grad_accum_steps: int
    rank: int
    world_size: int
    seed: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        steps = self.num_samples // self.global_batch_size
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def permutation(self, epoch: int) -> Tensor:
        """The permutation of this epoch, the same on every rank: int64 [num_samples]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def steps(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """This rank's micro-batches of each step of an epoch, from its step `first` on.

        A micro-batch is the numbers of its images: int64 [≤ batch_size].
        """
        global_batches = self.permutation(epoch).split(self.global_batch_size)
        for batch in global_batches[first : self.steps_per_epoch]:
            share = torch.tensor_split(batch, self.world_size)[self.rank]
            yield torch.tensor_split(share, self.grad_accum_steps)
