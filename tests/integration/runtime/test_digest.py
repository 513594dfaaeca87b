"""The digest of a tensor changes with every bit of it, and with nothing else.

Tests mpiddp/runtime/torch/divergence.py.
python -m pytest tests/integration/runtime/test_digest.py
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mpiddp.runtime.torch.divergence import digest

LARGE = 100_003  # elements
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
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = made(dtype, 3, 2)
    bits = 1 if dtype is torch.bool else 8 * tensor.element_size()
    size = 8 * tensor.element_size()
    positions = [size * element + bit for element in range(6) for bit in range(bits)]
    assert number(tensor) not in {number(flipped(tensor, bit)) for bit in positions}


def test_every_bit_counts_in_a_large_tensor() -> None:
    """Also the sign bit, the highest one of an integer."""
    tensor = torch.linspace(-1, 1, LARGE)
    before = number(tensor)
    draw = random.Random(0)
    elements = [0, LARGE - 1]
    elements += [draw.randrange(len(tensor)) for _ in range(20)]
    bits = tensor.view(torch.int32)
    for element in elements:
        for bit in (0, 17, 31):
            mask = (1 << bit) - (1 << 32 if bit == 31 else 0)
            bits[element] ^= mask
            assert number(tensor) != before, (element, bit)
            bits[element] ^= mask
    assert number(tensor) == before


def test_the_digest_is_the_sum_of_the_docstring() -> None:
    """int64 arithmetic of torch wraps around, which the proof needs: compare with Python's integers."""
    tensor = torch.randint(-(2**63), 2**63 - 1, (LARGE,))
    assert number(tensor) % 2**64 == sum(tensor.tolist()) % 2**64
    floats = torch.randn(LARGE)
    assert number(floats) == sum(floats.view(torch.int32).tolist())


def test_the_layout_in_memory_does_not_count() -> None:
    images = torch.randn(2, 3, 4, 5)
    same = [
        images.to(memory_format=torch.channels_last),
        images.transpose(1, 3).contiguous().transpose(1, 3),
        torch.cat([torch.zeros(1), images.reshape(-1)])[1:].view(images.shape),  # an odd offset
        torch.nn.Parameter(images),
    ]
    assert {number(each) for each in same} == {number(images)}
    assert number(torch.empty(0)) == 0


def test_the_number_of_threads_does_not_count() -> None:
    tensor = torch.randn(3 * LARGE)
    before, threads = number(tensor), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert number(tensor) == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_has_the_same_digest(dtype: torch.dtype) -> None:
    tensor = made(dtype, LARGE + 1)
    assert int(digest(tensor.cuda())) == number(tensor)
