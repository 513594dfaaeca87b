"""CIFAR-10 in a little more than half its size: a WebP mosaic without loss for each of its six batches.

A mosaic has 100 × 100 images. The labels lie beside it, a byte each. `write_batches` restores the official
binary batches, and `mpiddp train` compares their contents with the official SHA-256.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpiddp.errors import UserError
from mpiddp.train import cifar10
from mpiddp.train.cifar10 import BIN, BIN_FOLDER

BATCHES = tuple(Path(name).stem for name in BIN)
_SIDE = 100  # images in a row and in a column of a mosaic


def files_of(batch: str) -> tuple[str, str]:
    """The names of a batch's mosaic and labels."""
    return f"{batch}.webp", f"{batch}.labels"


def write_mosaics(data: Path, folder: Path) -> None:
    """Write the mosaics and labels of the CIFAR-10 in `data` into `folder`. Takes a minute.

    Raises:
        UserError: there is no CIFAR-10 in `data`, or a damaged one.
    """
    train, test = cifar10.read(data)
    parts = [*_batches(train), *_batches(test)]
    for batch, (images, labels) in zip(BATCHES, parts, strict=True):
        mosaic_file, labels_file = files_of(batch)
        rows = images.reshape(_SIDE, _SIDE, 32, 32, 3).transpose(0, 2, 1, 3, 4)
        mosaic = Image.fromarray(np.ascontiguousarray(rows).reshape(_SIDE * 32, _SIDE * 32, 3))
        mosaic.save(folder / mosaic_file, lossless=True, quality=50, method=4)
        (folder / labels_file).write_bytes(labels.astype(np.uint8).tobytes())


def _batches(split: cifar10.Images) -> list[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    images, labels = split
    count = len(labels) // cifar10.IMAGES_PER_BATCH
    return list(zip(np.split(images, count), np.split(labels, count), strict=True))


def are_complete(folder: Path) -> bool:
    """Whether `folder` has the mosaics and labels of all batches."""
    return all((folder / name).is_file() for batch in BATCHES for name in files_of(batch))


def write_batches(folder: Path, data: Path) -> None:
    """Write the official batches of the mosaics in `folder` into `data`, which then is a --data-dir.

    Raises:
        UserError: they are not those of CIFAR-10.
    """
    target = data / BIN_FOLDER
    part = data / f".{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for batch, name in zip(BATCHES, BIN, strict=True):
        mosaic_file, labels_file = files_of(batch)
        with Image.open(folder / mosaic_file, formats=["WEBP"]) as mosaic:
            pixels = np.asarray(mosaic.convert("RGB"))
        labels = np.frombuffer((folder / labels_file).read_bytes(), np.uint8)
        if pixels.shape != (_SIDE * 32, _SIDE * 32, 3) or len(labels) != _SIDE * _SIDE:
            raise UserError(
                f"{folder}: {batch} has other sizes than a mosaic of {_SIDE**2} images."
            )
        images = pixels.reshape(_SIDE, 32, _SIDE, 32, 3).transpose(0, 2, 4, 1, 3)
        records = np.empty((_SIDE**2, cifar10.RECORD_BYTES), np.uint8)
        records[:, 0] = labels
        records[:, 1:] = images.reshape(_SIDE**2, 3 * 32 * 32)
        records.tofile(part / name)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    cifar10.read(data)  # compares the SHA-256 of each file
