"""Smaller images in the first epochs, from which a model learns the same shapes in less time.

Howard trained so for DAWNBench (fast.ai, 2018), Tan and Le for EfficientNetV2 (2021). The convolutions of a
ResNet take images of any size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from mpiddp.train.data.dataset import Batch


def at_low_resolution(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches with images of 3/4 of the height and width: [N, C, H, W] to [N, C, 3/4 H, 3/4 W]."""
    for images, labels in batches:
        yield F.adaptive_avg_pool2d(images, low_resolution(*images.shape[2:])), labels


def low_resolution(height: int, width: int) -> tuple[int, int]:
    """3/4 of the height and width, in pixels."""
    return max(1, height * 3 // 4), max(1, width * 3 // 4)
