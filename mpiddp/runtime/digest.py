"""A number of 64 bits for the bits of a tensor, computed on its device.

The elements are read as integers of at most 32 bits. A block of them, x_1 to x_n, has the sum of w_i · x_i
mod 2^64, with odd weights w_i. If one integer of the block changes by d, with 0 < |d| < 2^32, the sum
changes by w_i · d. That is never 0 mod 2^64, because an odd number has an inverse. `combine` joins the
sums of blocks, and the digests of tensors, with a function that maps different numbers to different ones,
and again with odd weights; of more than a block of sums, it first joins the sums of each block. So a flipped
bit, or any other change of one integer, always changes the digest. Several changes at once cancel each other
with a probability of about 2^-32, because the weights are mixed bits.

Integers add up to the same sum in any order. So the digest does not depend on the device, on the number
of threads, or on the layout of the tensor in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 1 << 16  # integers
# A CPU computes one block at a time, whose products fit into its cache; a GPU 32 MiB of products.
_BLOCKS_AT_ONCE = {"cpu": 1, "other": 64}
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; 2^64 divided by the golden ratio
_LOW_32_BITS = 0xFFFFFFFF
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int32,
}  # by bytes of an element


def digest_all(tensors: Iterable[Tensor]) -> Tensor:
    """The digest of each of N tensors, at least one: int64 [N], on the device of the first."""
    digests = [digest(tensor) for tensor in tensors]
    return torch.stack([each.to(digests[0].device) for each in digests])


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor of any shape and type: int64 [], on its device.

    Of a DTensor, that of this rank's shard.
    """
    sums = _block_sums(_as_integers(tensor))
    while len(sums) > BLOCK:
        sums = torch.stack([combine(part) for part in sums.split(BLOCK)])
    return sums[0] if len(sums) == 1 else combine(sums)


@torch.no_grad()
def combine(digests: Tensor) -> Tensor:
    """One digest for several of one device, in their order: int64 [N], N at most BLOCK, to int64 []."""
    return (_mix(digests) * _weights(digests.device)[: len(digests)]).sum()


def _block_sums(integers: Tensor) -> Tensor:
    """The weighted sum of each block of the integers, [N]: int64 [N / BLOCK], at least [1]."""
    weights = _weights(integers.device)
    at_once = _BLOCKS_AT_ONCE["cpu" if integers.device.type == "cpu" else "other"]
    sums = []
    for part in integers.split(BLOCK * at_once):
        num_whole = len(part) // BLOCK * BLOCK
        if num_whole:
            sums.append((part[:num_whole].view(-1, BLOCK) * weights).sum(1))
        if num_whole < len(part) or not num_whole:
            rest = part[num_whole:]
            sums.append((rest * weights[: len(rest)]).sum().view(1))
    return torch.cat(sums)


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers of at most 32 bits: [N]."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """The weight of each position in a block, odd and the same on every device: int64 [BLOCK]."""
    positions = torch.arange(1, BLOCK + 1, device=device)
    return _mix(_mix(positions)) | 1


def _mix(numbers: Tensor) -> Tensor:
    """Map int64 to int64, different numbers to different ones.

    x xor (x >> 32), with zeros shifted in, can be undone, and so can a multiplication by an odd number.
    """
    return (numbers ^ ((numbers >> 32) & _LOW_32_BITS)) * _FACTOR
