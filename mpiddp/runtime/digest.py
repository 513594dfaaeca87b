"""A number of 64 bits for the bits of a tensor, computed on its device: the sum of its elements as integers.

A flipped bit of an integer changes it by a power of 2 below 2^64, so it always changes the sum mod 2^64. Any
other change of one integer does too. Several changes cancel only if they add up to 0, as those of two
elements that have changed places do. Integers add up to the same sum in any order, so the digest does not
depend on the device, on the number of threads, or on the layout of the tensor in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor of any shape and type: int64 [], on its device.

    Of a DTensor, that of this rank's shard.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
