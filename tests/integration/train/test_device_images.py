"""Augmentation on the device. tests/promises/test_training.py has the shifts and flips of CIFAR-10's size.

Tests mpiddp/train/datasets.py.
python -m pytest tests/integration/train/test_device_images.py
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpiddp.train.cifar10 import MEAN, STD
from mpiddp.train.datasets import DeviceImages
from tests.support.training import configured

Bytes = NDArray[np.uint8]
Arrays = tuple[Bytes, NDArray[np.int64]]


def arrays(num_images: int = 40, height: int = 12, width: int = 10) -> Arrays:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (num_images, height, width, 3), dtype=np.uint8)
    return images, draw.integers(0, 10, num_images)


def source(data: Arrays, *, seed: int = 0) -> DeviceImages:
    return DeviceImages(*data, configured(f"--seed={seed}"), torch.device("cpu"), augment=True)


def batch(images: DeviceImages, numbers: Tensor, *, epoch: int = 0) -> Tensor:
    ((pixels, _),) = images.batches([numbers], epoch=epoch)
    return pixels


def pixels_of(image: Tensor) -> Bytes:
    """Convert an image of a source, [C, H, W], back to its bytes, [H, W, C]."""
    values = image.numpy().transpose(1, 2, 0)
    exact = (values * np.array(STD) + np.array(MEAN)) * 255
    rounded = exact.round()
    assert np.abs(exact - rounded).max() < 1e-3
    pixels: Bytes = rounded.astype(np.uint8)
    return pixels


def test_the_border_is_mirrored_without_repeating_the_edge() -> None:
    """A crop of the row 0 1 2 … 9 that begins two pixels early is 2 1 0 1 2 …"""
    row = np.tile(np.arange(10, dtype=np.uint8)[None, :, None], (10, 1, 3))
    images = source((row[None].repeat(99, 0), np.zeros(99, np.int64)))
    rows = {tuple(pixels_of(image)[4, :, 0].tolist()) for image in batch(images, torch.arange(99))}
    assert (2, 1, 0, 1, 2, 3, 4, 5, 6, 7) in rows
    assert (7, 6, 5, 4, 3, 2, 1, 0, 1, 2) in rows  # the same, flipped
    assert (2, 3, 4, 5, 6, 7, 8, 9, 8, 7) in rows


def test_augmentation_depends_only_on_seed_epoch_and_image() -> None:
    data, everything = arrays(), torch.arange(40)
    images = source(data)
    expected = batch(images, everything, epoch=3)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for order, size in ((everything, 40), (shuffled, 7), (shuffled.flip(0), 1)):
        fresh = source(data)  # as on another rank, or after a resume
        parts = [pixels for pixels, _ in fresh.batches(order.split(size), epoch=3)]
        assert torch.equal(torch.cat(parts), expected[order])
    torch.manual_seed(99)
    assert torch.equal(batch(images, torch.tensor([5]), epoch=3)[0], expected[5])
    assert not torch.equal(batch(images, everything, epoch=4), expected)
    assert not torch.equal(batch(source(data, seed=1), everything, epoch=3), expected)
