"""Small image data sets as arrays in memory, and the default folder of data.

A data set is two NumPy arrays for training and two for testing. A batch is selected by an index.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import UserError
from mpiddp.protocol.variables import DATA


@dataclass(frozen=True)
class ImageArrays:
    """Images and their classes: `images` uint8 [N, H, W, C], `labels` int64 [N]; writable."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class ArrayDataset:
    """A data set held in memory. Labels are in [0, num_classes)."""

    name: str
    num_classes: int
    train: ImageArrays
    test: ImageArrays


def sha256(dataset: ArrayDataset) -> str:
    """The SHA-256 of train images, train labels, test images and test labels, in this order.

    Images count as their bytes in [N, H, W, C] order, labels as little-endian int64.
    """
    digest = hashlib.sha256()
    for part in (dataset.train, dataset.test):
        digest.update(np.ascontiguousarray(part.images).data)
        digest.update(np.ascontiguousarray(part.labels, dtype="<i8").data)
    return digest.hexdigest()


def default_data_dir() -> Path:
    """The folder of data unless --data-dir names another: $MPIDDP_DATA, else the user's cache.

    Raises:
        UserError: this user has no home folder.
    """
    if named := os.environ.get(DATA):
        return Path(named)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "mpiddp"
    try:
        return Path.home() / ".cache" / "mpiddp"
    except RuntimeError:  # a container's user without an entry in /etc/passwd
        raise UserError(
            "no folder for data: HOME is not set, and this user has no home folder. "
            "Name one: --data-dir DIR, or MPIDDP_DATA=DIR."
        ) from None
