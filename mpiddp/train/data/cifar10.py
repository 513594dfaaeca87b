"""CIFAR-10 from its six official batches, in either of the two official layouts.

`cifar-10-batches-bin` contains records of one label byte and 3072 pixel bytes, `cifar-10-batches-py` contains
pickles. Each file is compared with its pinned SHA-256 before it is parsed. Only the official files have
these hashes, so they are trusted from there on, also by Python's unpickler.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import UserError
from mpiddp.paths import cause_of, read_limited
from mpiddp.train.data.arrays import ImageArrays
from mpiddp.train.data.cifar10_files import BIN, BIN_FOLDER, PY, PY_FOLDER

IMAGES_PER_BATCH = 10_000
RECORD_BYTES = 1 + 3 * 32 * 32
_MAX_BYTES = 32 << 20  # no official file has more

# Labels [10000] and pixels [10000, 3 × 1024], the planes red, green and blue one after another.
_Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def read_bin(files: Sequence[Path]) -> tuple[ImageArrays, ImageArrays]:
    """Read the batches of `cifar-10-batches-bin`: 50,000 + 10,000 images [N, 32, 32, 3], in their order.

    Args:
        files: the five batches for training and the one for testing.

    Raises:
        UserError: a file is missing, or is not CIFAR-10's.
        JobFailed: a disk has failed.
    """
    records = [
        np.frombuffer(_verified(file, BIN), np.uint8).reshape(IMAGES_PER_BATCH, RECORD_BYTES)
        for file in files
    ]
    return _splits([(each[:, 0], each[:, 1:]) for each in records])


def read_py(
    files: Sequence[Path], sha256: Mapping[str, str] = PY
) -> tuple[ImageArrays, ImageArrays]:
    """Read the batches of `cifar-10-batches-py`, which Python 2 has pickled. As `read_bin`.

    Args:
        sha256: the pinned hashes, by the file's name.
    """
    batches = []
    for file in files:
        content = _verified(file, sha256)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # NumPy 2.4 dislikes how Python 2 has described the dtype
            batch = pickle.loads(content, encoding="bytes")
        batches.append((np.array(batch[b"labels"], np.uint8), batch[b"data"]))
    return _splits(batches)


def _verified(file: Path, sha256: Mapping[str, str]) -> bytes:
    """The contents of the file, which has its pinned hash."""
    try:
        content = read_limited(file, _MAX_BYTES)
    except OSError as error:
        raise cause_of(error)(f"{file}: {error.strerror}; {_hint(file)}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256[file.name]:
        raise UserError(
            f"{file} is not CIFAR-10's: its SHA-256 is {digest} instead of {sha256[file.name]}; "
            f"{_hint(file)}"
        )
    return content


def _hint(file: Path) -> str:
    own = file.parent.name in (BIN_FOLDER, PY_FOLDER)  # else it may hold anything of the user's
    what = file.parent if own else f"the batches in {file.parent}"
    return (
        f"remove {what} and run again to download it again; "
        "images of your own go into an image folder, see --dataset."
    )


def _splits(batches: Sequence[_Batch]) -> tuple[ImageArrays, ImageArrays]:
    return _assemble(batches[:-1]), _assemble(batches[-1:])


def _assemble(batches: Sequence[_Batch]) -> ImageArrays:
    images = np.empty((len(batches), IMAGES_PER_BATCH, 32 * 32, 3), np.uint8)
    for batch_images, (_, pixels) in zip(images, batches, strict=True):
        planes = pixels.reshape(IMAGES_PER_BATCH, 3, 32 * 32)
        for channel in range(3):  # five times as fast as one transpose
            batch_images[:, :, channel] = planes[:, channel]
    labels = np.concatenate([labels for labels, _ in batches]).astype(np.int64)
    return ImageArrays(images.reshape(-1, 32, 32, 3), labels)
