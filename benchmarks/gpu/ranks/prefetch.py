"""Batches from the side stream, while the main stream computes, beside the same batches without it.

    python -m benchmarks.gpu.ranks.prefetch FOLDER_OF_IMAGES

Sends the number of batches that were compared, and of those that differed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpiddp.bench.result_lines import emit
from mpiddp.train.config import resolve
from mpiddp.train.datasets import Dataset, DeviceImages, prefetched
from mpiddp.train.image_folder import ImageFolder
from mpiddp.train.options import parse

BATCH, EPOCHS = 64, 3


def main(folder: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
    labels = draw.integers(0, 10, len(pixels))
    config = resolve(parse(["--num-workers=2"]), 1, device)
    config.image_size = 64
    sources: dict[str, Dataset] = {
        "arrays on the device": DeviceImages(pixels, labels, config, device, augment=True),
        "image folder": ImageFolder(folder, config, device, augment=True),
    }
    emit({name: _compare(source, device) for name, source in sources.items()})


def _compare(source: Dataset, device: torch.device) -> dict[str, int]:
    compared = different = 0
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(source.num_images, generator=generator).split(BATCH)
        expected = [images.cpu() for images, _ in source.batches(order, epoch=epoch)]
        batches = prefetched(source.batches(order, epoch=epoch), device)
        found = [images.cpu() for images in _used_late(batches, device)]
        compared += len(expected)
        different += sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True))
    return {"compared": compared, "different": different}


def _used_late(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[Tensor]:
    """Copies of the images, each behind a queue of other work on the main stream."""
    size = 2048 if device.type == "cuda" else 8
    work = torch.ones(size, size, device=device)
    copies = []
    for images, _ in batches:
        for _ in range(10):
            work = work @ work / size
        copies.append(images.clone())
        del images  # its memory is free for the next batch, unless a stream still needs it
    yield from copies


if __name__ == "__main__":
    main(Path(sys.argv[1]))
