"""A sharded tensor that is still in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.state import is_sharded, own_part
from mpiddp.errors import UserError


@dataclass(frozen=True)
class ShardedValue:
    """A tensor that is still in its files, in `Resumed.state` in place of the tensor.

    The boxes are those of all ranks, with their offsets, in mapped files, so each is read when it is used.
    `placements`: for each dimension of the mesh that saved it, the dimension of the tensor that the ranks
    divided among them, or None.
    """

    shape: torch.Size
    boxes: Sequence[tuple[Tensor, Sequence[int]]]
    placements: Sequence[int | str | None] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.boxes[0][0].dtype

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective."""
        return self._filled(torch.empty(self.shape, dtype=self.dtype, device="cpu"))

    def read_like(self, like: Any) -> Tensor:
        """The tensor, placed as `like` is. This reads the bytes of this rank only, and is no collective.

        If the shapes differ, as for a factored state of an optimizer, the tensor gets the placements with
        which it was saved, on the mesh of `like`.
        """
        if like.shape == self.shape:
            return self._filled(torch.empty_like(like, dtype=self.dtype, requires_grad=False))
        if not is_sharded(like):
            return self.full_tensor().to(like.device)
        from torch.distributed.tensor import Replicate, Shard, empty

        mesh = like.device_mesh
        fits = len(self.placements) == mesh.ndim
        if fits and any(isinstance(dim, str) for dim in self.placements):
            raise UserError(f"a tensor of shape {list(self.shape)} was saved as {self.placements}")
        dims = self.placements if fits else [None] * mesh.ndim
        places = [Shard(dim) if isinstance(dim, int) else Replicate() for dim in dims]
        return self._filled(empty(self.shape, dtype=self.dtype, device_mesh=mesh, placements=places))

    def _filled(self, target: Tensor) -> Tensor:
        """The target, into which this rank's part is read."""
        part, offsets = own_part(target)
        for box, at in self.boxes if part.numel() else ():
            _copy_overlap(box, at, part, offsets)
        return target


def _copy_overlap(source: Tensor, at: Sequence[int], target: Tensor, to: Sequence[int]) -> None:
    """Copy the elements that both boxes have. Their offsets in the whole tensor are `at` and `to`."""
    for dim, (first, second) in enumerate(zip(at, to, strict=True)):
        start = max(first, second)
        end = min(first + source.shape[dim], second + target.shape[dim])
        if start >= end:
            return
        source = source.narrow(dim, start - first, end - start)
        target = target.narrow(dim, start - second, end - start)
    target.copy_(source)
