"""Data sets of a few images in the layouts of the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def two_epochs(folder: Path, *options: str) -> list[str | Path]:
    """Options of `mpiddp train` for two epochs over 27 images with augmentation, and 12 test images."""
    data = folder / "data"
    if not data.exists():
        image_folder(data, 9, 4)
    return [
        *("--dataset=image-folder", f"--data-dir={data}", "--image-size=28", "--num-workers=0"),
        *("--arch=resnet20", "--stem=cifar", "--epochs=2", *options),
    ]


def image_folder(folder: Path, num_train: int, num_test: int) -> Path:
    """Write train/CLASS/*.jpg and val/CLASS/*.jpg, with these numbers of images in each of 3 classes."""
    draw = np.random.default_rng(0)
    for split, count in (("train", num_train), ("val", num_test)):
        for name in ("cat", "dog", "eel"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 256, (40, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.jpg")
    return folder
