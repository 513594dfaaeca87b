"""The digest of a tensor changes with every bit of it, and with nothing else.

Tests mpiddp/runtime/digest.py.
python -m pytest tests/test_digest.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mpiddp.runtime import digest as module
from mpiddp.runtime.digest import BLOCK, combine, digest, digest_all

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
    """Each flipped bit gives a digest of its own."""
    tensor = made(dtype, 3, 2)
    bits = 1 if dtype is torch.bool else 8 * tensor.element_size()
    size = 8 * tensor.element_size()
    positions = [size * element + bit for element in range(6) for bit in range(bits)]
    found = {number(flipped(tensor, bit)) for bit in positions}
    assert len(found) == len(positions)
    assert number(tensor) not in found


def test_every_bit_counts_in_a_tensor_of_several_blocks() -> None:
    """Also next to the ends of blocks, and for the sign bit, the highest one of an integer."""
    tensor = torch.linspace(-1, 1, 2 * BLOCK + 3)
    before = number(tensor)
    draw = random.Random(0)
    elements = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 2]
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
    tensor = torch.randn(BLOCK + 5)
    weights = module._weights(tensor.device).tolist()
    assert all(weight % 2 for weight in weights)
    assert len(set(weights)) == BLOCK
    integers = tensor.view(torch.int32).tolist()
    sums = [
        sum(w * x for w, x in zip(weights, block, strict=False)) % 2**64
        for block in (integers[:BLOCK], integers[BLOCK:])
    ]
    mixed = [(each ^ (each >> 32)) * (module._FACTOR % 2**64) for each in sums]
    expected = sum(w * x for w, x in zip(weights, mixed, strict=False)) % 2**64
    assert number(tensor) % 2**64 == expected


def test_changes_that_might_cancel_each_other() -> None:
    tensor = torch.linspace(1, 2, 1000)
    swapped = tensor.clone()
    swapped[[3, 700]] = tensor[[700, 3]]
    changed = [tensor, swapped, -tensor, tensor.flip(0), tensor + 1]
    for first in range(0, 64, 7):  # two signs at once, in every distance
        for second in range(first + 1, 64):
            signs = torch.ones(1000)
            signs[[first, second]] = -1
            changed.append(tensor * signs)
    assert len({number(each) for each in changed}) == len(changed)


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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 4 integers."""
    monkeypatch.setattr(module, "BLOCK", 4)
    module._weights.cache_clear()
    yield
    module._weights.cache_clear()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_integers", [16, 17, 65])
def test_every_bit_counts_in_a_tensor_of_more_blocks_than_a_block_has_integers(
    num_integers: int,
) -> None:
    """At the default of BLOCK, this is a tensor of more than 16 GiB."""
    tensor = torch.linspace(-1, 1, num_integers)
    found = {number(flipped(tensor, bit)) for bit in range(32 * num_integers)}
    assert len(found) == 32 * num_integers
    assert number(tensor) not in found


@pytest.mark.parametrize("num_integers", [0, 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 7])
def test_the_number_of_blocks_at_once_does_not_count(
    monkeypatch: pytest.MonkeyPatch, num_integers: int
) -> None:
    """A GPU takes more at once than a CPU."""
    tensor = torch.randn(num_integers)
    found = set()
    for at_once in (1, 2, 64):
        monkeypatch.setitem(module._BLOCKS_AT_ONCE, "cpu", at_once)
        found.add(number(tensor))
    assert len(found) == 1


def test_the_number_of_threads_does_not_count() -> None:
    tensor = torch.randn(3 * BLOCK)
    before, threads = number(tensor), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert number(tensor) == before
    finally:
        torch.set_num_threads(threads)


def test_combined_digests_depend_on_each_of_them_and_on_their_order() -> None:
    tensors = [torch.randn(3), torch.tensor(7), torch.ones(2, dtype=torch.bfloat16)]
    digests = digest_all(tensors)
    assert digests.tolist() == [number(each) for each in tensors]
    found = {int(combine(digests)), int(combine(digests.flip(0)))}
    for index in range(3):
        for bit in range(64):
            changed = digests.clone()
            changed[index] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
            found.add(int(combine(changed)))
    assert len(found) == 2 + 3 * 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_has_the_same_digest(dtype: torch.dtype) -> None:
    tensor = made(dtype, BLOCK + 1)
    assert int(digest(tensor.cuda())) == number(tensor)
