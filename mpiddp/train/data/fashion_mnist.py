"""Fashion-MNIST from its four gzipped IDX files, which Debian and Ubuntu package.

The search covers the data folder, its subfolder `fashion-mnist`, and the folder of Debian's package.
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error
from mpiddp.train.data.arrays import ArrayDataset, ImageArrays

NAME = "fashion-mnist"
NUM_CLASSES = 10
DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"

_FILES = tuple(
    f"{part}-{content}-ubyte.gz"
    for part in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)
_UNSIGNED_BYTES = 0x08


def load(folder: Path, *elsewhere: Path) -> ArrayDataset:
    """Load Fashion-MNIST: images [N, 28, 28, 1], 60,000 for training and 10,000 for testing.

    Raises UserError if no folder contains it, or if one of its files is damaged; JobFailed if a disk fails.
    """
    folders = (folder, folder / "fashion-mnist", *elsewhere)
    found = next((f for f in folders if all((f / name).exists() for name in _FILES)), None)
    if found is None:
        raise UserError(
            f"no Fashion-MNIST ({', '.join(_FILES)}) in {', '.join(map(str, folders))}; "
            "copy the four files into one of them, "
            + (f"or: apt-get install {DEBIAN_PACKAGE}" if elsewhere else "or leave --data-dir out.")
        )
    train, test = (
        _read_pair(found / images, found / labels) for images, labels in (_FILES[:2], _FILES[2:])
    )
    return ArrayDataset(name=NAME, num_classes=NUM_CLASSES, train=train, test=test)


def _read_pair(images_file: Path, labels_file: Path) -> ImageArrays:
    images, labels = _read_idx(images_file, 3), _read_idx(labels_file, 1)
    if images.shape[1:] != (28, 28):
        raise UserError(f"{images_file}: images of {images.shape[1:]} pixels instead of (28, 28)")
    if len(images) != len(labels):
        raise UserError(
            f"{labels_file} has {len(labels):,} labels for the {len(images):,} images "
            f"of {images_file.name}"
        )
    if labels.max(initial=0) >= NUM_CLASSES:
        raise UserError(f"{labels_file}: label {labels.max()} is not one of 0 to {NUM_CLASSES - 1}")
    return ImageArrays(images[..., np.newaxis], labels.astype(np.int64))


def _read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read the array of a gzipped IDX file: a magic number, big-endian sizes, then unsigned bytes."""
    try:
        with gzip.open(file) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
            raise read_error(str(file), error) from None
        raise UserError(f"{file}: not a readable gzip file ({error}). Download it again.") from None

    header = struct.Struct(f">HBB{dimensions}I")
    if len(content) < header.size:
        raise UserError(
            f"{file}: {len(content)} bytes, too short for an IDX file. Download it again."
        )
    zero, kind, found_dimensions, *shape = header.unpack_from(content)
    if (zero, kind, found_dimensions) != (0, _UNSIGNED_BYTES, dimensions):
        raise UserError(
            f"{file}: starts with {content[:4].hex()} instead of 000008{dimensions:02x}, so it is "
            f"not an IDX file of unsigned bytes in {dimensions} dimensions. Download it again."
        )
    values = np.frombuffer(content, np.uint8, offset=header.size)
    if values.size != np.prod(shape, dtype=object):
        raise UserError(
            f"{file}: its header announces {' × '.join(map(str, shape))} bytes and "
            f"{values.size:,} follow. Download it again."
        )
    array: NDArray[np.uint8] = values.reshape(shape).copy()  # a view of bytes is read-only
    return array
