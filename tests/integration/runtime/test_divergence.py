"""The backend of a process group, and the digests by which its ranks are compared.

The digests change with every bit. The majority of the ranks is right.
"""

import pytest
import torch
from torch import Tensor

from mpiddp.errors import UserError
from mpiddp.runtime.torch.divergence import digest
from mpiddp.runtime.torch.process_group import choose_backend
from tests.support.errors import error

TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
)


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy in which one bit differs; `bit` counts through the bytes of the tensor."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    content = bytearray(numbers.reshape(-1).view(torch.uint8).numpy().tobytes())
    content[bit // 8] ^= 1 << (bit % 8)
    return torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape)


def number(tensor: Tensor) -> int:
    return int(digest(tensor).item())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_counts(dtype):
    tensor = made(dtype, 3, 2)
    bits = 1 if dtype is torch.bool else 8 * tensor.element_size()
    size = 8 * tensor.element_size()
    positions = [size * element + bit for element in range(6) for bit in range(bits)]
    assert number(tensor) not in {number(flipped(tensor, bit)) for bit in positions}


def test_the_layout_in_memory_does_not_count():
    images = torch.randn(2, 3, 4, 5)
    same = [
        images.to(memory_format=torch.channels_last),
        images.transpose(1, 3).contiguous().transpose(1, 3),
        torch.cat([torch.zeros(1), images.reshape(-1)])[1:].view(images.shape),  # an odd offset
        torch.nn.Parameter(images),
    ]
    assert {number(each) for each in same} == {number(images)}
    assert number(torch.empty(0)) == 0


@pytest.mark.parametrize("name", ["cpu:gloo,cuda:nccl", "GLOO", "mpi", ""])
def test_a_backend_that_no_group_of_ours_can_have(name):
    with pytest.raises(UserError, match=error("expected gloo", f"'{name}'", "gloo or ")):
        choose_backend(name)
