"""Synthetic data: random images and labels, different on every rank, the same after a resume.

Tests mpiddp/train/data/synthetic.py.
python -m pytest tests/integration/train/test_synthetic.py
"""

import torch
from torch import Tensor

from mpiddp.train.data.synthetic import POOL_BATCHES, SyntheticImages


def source(*, rank: int = 0, seed: int = 0, channels_last: bool = True) -> SyntheticImages:
    return SyntheticImages(
        torch.device("cpu"),
        num_images=1000,
        num_classes=10,
        shape=(3, 8, 8),
        batch_size=20,
        seed=seed,
        rank=rank,
        channels_last=channels_last,
    )


def batch(images: SyntheticImages, numbers: Tensor) -> tuple[Tensor, Tensor]:
    (got,) = images.batches([numbers], epoch=0)
    return got


def test_images_are_standard_normal_and_labels_uniform() -> None:
    got = [batch(source(), torch.arange(first, first + 20)) for first in range(POOL_BATCHES)]
    images, labels = (torch.cat(parts) for parts in zip(*got, strict=True))
    assert images.shape == (20 * POOL_BATCHES, 3, 8, 8)
    assert images.mean().abs() < 0.05
    assert (images.std() - 1).abs() < 0.05
    assert set(labels.tolist()) == set(range(10))
    assert len({image.sum().item() for image in images}) == len(images)  # no two alike


def test_every_rank_and_seed_has_other_images() -> None:
    sums = {
        batch(source(rank=rank, seed=seed), torch.arange(20))[0].sum().item()
        for rank in range(3)
        for seed in range(3)
    }
    assert len(sums) == 9


def test_a_resume_within_an_epoch_gives_the_same_images() -> None:
    order = list(torch.randperm(1000, generator=torch.Generator().manual_seed(0)).split(20))
    whole = list(source().batches(order, epoch=0))
    for done in (1, 2, 3, 7):
        rest = source().batches(order[done:], epoch=0)
        for (images, labels), (expected, expected_labels) in zip(rest, whole[done:], strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, expected_labels)


def test_a_batch_of_a_tail_may_be_larger_or_smaller() -> None:
    for first in range(POOL_BATCHES):
        for size in (2, 21):
            images, labels = batch(source(), torch.arange(first, first + size))
            assert len(images) == len(labels) == size


def test_memory_layout() -> None:
    last, first = (
        batch(source(channels_last=channels_last), torch.arange(20))[0]
        for channels_last in (True, False)
    )
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert first.is_contiguous()
    assert torch.equal(last, first)
