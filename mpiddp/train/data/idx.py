"""The four gzipped IDX files of MNIST and of the data sets in its format, such as Fashion-MNIST."""

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import UserError
from mpiddp.paths import read_error
from mpiddp.train.data.arrays import ImageArrays

_UNSIGNED_BYTES = 0x08


def read(files: Sequence[Path]) -> tuple[ImageArrays, ImageArrays]:
    """Read the images [N, H, W, 1] and labels for training, and those for testing.

    Args:
        files: images and labels for training, images and labels for testing.

    Raises:
        UserError: a file is missing or damaged.
        JobFailed: a disk has failed.
    """
    train_images, train_labels, test_images, test_labels = files
    return _read_pair(train_images, train_labels), _read_pair(test_images, test_labels)


def _read_pair(images_file: Path, labels_file: Path) -> ImageArrays:
    images, labels = _read_array(images_file, 3), _read_array(labels_file, 1)
    if len(images) != len(labels):
        raise UserError(
            f"{labels_file} has {len(labels):,} labels for the {len(images):,} images "
            f"of {images_file.name}."
        )
    return ImageArrays(images[..., np.newaxis], labels.astype(np.int64))


def _read_array(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read the array of a gzipped IDX file: a magic number, big-endian sizes, then unsigned bytes."""
    try:
        with gzip.open(file) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
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
