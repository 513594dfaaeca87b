"""Data sets of a few images in the layouts of the real ones."""

from pathlib import Path

import numpy as np
from PIL import Image


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


def numbered_images(folder: Path, num_train: int) -> Path:
    """Write an image folder whose images differ in their gray.

    tests/programs/watched_training.py knows the number of an image by it.
    """
    for split, count in (("train", num_train), ("val", 7)):
        for number in range(count):
            path = folder / split / f"class_{number % 3}" / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (20 + 2 * number,) * 3).save(path, quality=100)
    return folder
