"""Data sets of a few images in the layouts of the real ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def fashion_mnist(folder: Path, num_train: int, num_test: int) -> Path:
    """Write random images with random labels as Fashion-MNIST's four files."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", num_train), ("t10k", num_test)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(
                gzip.compress(header + array.tobytes(), 1)
            )
    return folder


def two_epochs(folder: Path, *options: str) -> list[str | Path]:
    """Options of `mpiddp train` for two epochs over 26 images with augmentation, and 11 test images."""
    data = folder / "data"
    if not data.exists():
        fashion_mnist(data, 26, 11)
    return [
        "--dataset=fashion-mnist", f"--data-dir={data}", "--arch=resnet20", "--epochs=2", *options,
    ]  # fmt: skip


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
