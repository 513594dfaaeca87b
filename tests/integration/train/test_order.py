"""Each image is used once per epoch, in an order that does not depend on the ranks or on a resume.

Tests mpiddp/train/order.py.
"""

import itertools
from dataclasses import replace

from mpiddp.train.order import Order


def orders(num_samples: int, batch_size: int, accum: int, world_size: int) -> list[Order]:
    """The order of every rank."""
    images = batch_size * accum * world_size
    first = Order(num_samples, images, accum, 0, world_size, seed=5)
    return [replace(first, rank=rank) for rank in range(world_size)]


def global_steps(ranks: list[Order], epoch: int, first: int = 0) -> list[list[int]]:
    """The images of each step over all ranks, in the order of the ranks."""
    steps = zip(*(list(rank.steps(epoch, first)) for rank in ranks), strict=True)
    return [
        [int(number) for micro_batches in of_ranks for each in micro_batches for number in each]
        for of_ranks in steps
    ]


def test_each_epoch_and_seed_has_another_order():
    one = orders(100, 10, 1, 1)[0]
    other = replace(one, seed=6)
    found = [each.permutation(epoch).tolist() for each in (one, other) for epoch in range(3)]
    assert len({tuple(numbers) for numbers in found}) == 6
    assert found[0] == one.permutation(0).tolist() != list(range(100))


def test_max_steps_ends_an_epoch_early():
    rank = orders(100, 10, 1, 1)[0]
    for num_samples, most, expected in ((100, 3, 3), (100, 99, 10), (5, 3, 0)):
        short = replace(rank, num_samples=num_samples, max_steps=most)
        assert len(list(short.steps(epoch=0))) == short.steps_per_epoch == expected


def test_resuming_after_any_step_is_exact_with_any_number_of_ranks():
    """Each image is used once, except a tail. Any number of ranks with the same global batch goes on."""
    splits = [(12, 1, 1), (6, 1, 2), (2, 2, 3), (3, 1, 4)]
    for num_samples in (60, 64, 61):
        whole = global_steps(orders(num_samples, *splits[0]), epoch=4)
        assert len({number for step in whole for number in step}) == num_samples // 12 * 12
        for done, split in itertools.product(range(len(whole) + 1), splits):
            ranks = orders(num_samples, *split)
            assert global_steps(ranks, epoch=4)[:done] == whole[:done]
            assert global_steps(ranks, epoch=4, first=done) == whole[done:]
