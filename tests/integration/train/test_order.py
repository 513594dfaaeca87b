"""Each image is used once per epoch, in an order that does not depend on the ranks or on a resume.

Tests mpiddp/train/order.py.
python -m pytest tests/integration/train/test_order.py
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from mpiddp.train.order import Order, Step, share_of


def orders(num_samples: int, batch_size: int, accum: int, world_size: int) -> list[Order]:
    """The order of every rank."""
    images = batch_size * accum * world_size
    first = Order(num_samples, images, accum, 0, world_size, seed=5)
    return [replace(first, rank=rank) for rank in range(world_size)]


def combinations() -> Iterator[tuple[int, int, int, int]]:
    """(images, batch size, accumulation steps, ranks): all small values, and some random ones."""
    yield from itertools.product((1, 2, 7, 24, 25), (1, 2, 4), (1, 2, 3), (1, 2, 3, 4))
    draw = random.Random(0)
    for _ in range(200):
        yield draw.randint(1, 999), draw.randint(1, 20), draw.randint(1, 4), draw.randint(1, 9)


def images(step: Step) -> list[int]:
    """All images of a step on one rank."""
    return [int(number) for batch in step.micro_batches for number in batch]


def global_steps(ranks: list[Order], epoch: int, position: int = 0) -> list[list[int]]:
    """The images of each step over all ranks, in the order of the ranks."""
    steps = zip(*(list(rank.steps(epoch, position)) for rank in ranks), strict=True)
    return [[number for step in parts for number in images(step)] for parts in steps]


def test_every_image_is_used_once_per_epoch_except_a_tail() -> None:
    for sizes in combinations():
        ranks = orders(*sizes)
        num_samples, global_batch = sizes[0], ranks[0].global_batch_size
        for epoch in (0, 3):
            steps = global_steps(ranks, epoch)
            seen = [number for step in steps for number in step]
            left_out = num_samples % global_batch
            assert len(seen) == len(set(seen)) == num_samples - left_out, sizes
            assert set(seen) <= set(range(num_samples))
            assert len(steps) == ranks[0].steps_per_epoch


def test_each_epoch_and_seed_has_another_order() -> None:
    one = orders(100, 10, 1, 1)[0]
    other = replace(one, seed=6)
    found = [each.permutation(epoch).tolist() for each in (one, other) for epoch in range(3)]
    assert len({tuple(numbers) for numbers in found}) == 6
    assert found[0] == one.permutation(0).tolist() != list(range(100))
    assert all(sorted(numbers) == list(range(100)) for numbers in found)


def test_max_steps_ends_an_epoch_early() -> None:
    rank = replace(orders(100, 10, 1, 1)[0], max_steps=3)
    assert rank.steps_per_epoch == 3
    assert [s.num_images for s in rank.steps(epoch=0)] == [10, 10, 10]
    assert replace(rank, max_steps=99).steps_per_epoch == 10
    assert replace(rank, num_samples=5).steps_per_epoch == 0


def test_resuming_at_a_position_is_exact_with_any_number_of_ranks() -> None:
    """Stop after any step, and resume on another number of ranks with the same global batch."""
    splits = [(12, 1, 1), (6, 1, 2), (2, 2, 3), (3, 1, 4)]
    for num_samples in (60, 64, 61):
        whole = global_steps(orders(num_samples, *splits[0]), epoch=4)
        for done, (before, after) in itertools.product(
            range(len(whole) + 1), itertools.permutations(splits, 2)
        ):
            first = global_steps(orders(num_samples, *before), epoch=4)[:done]
            position = sum(map(len, first))
            rest = global_steps(orders(num_samples, *after), epoch=4, position=position)
            assert first + rest == whole


def test_evaluation_shares_have_every_image_once_and_differ_by_one() -> None:
    for num_samples, world_size in itertools.product((0, 1, 2, 3, 10, 37, 10_000), range(1, 10)):
        shares = [share_of(num_samples, rank, world_size) for rank in range(world_size)]
        assert [number for share in shares for number in share] == list(range(num_samples))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
