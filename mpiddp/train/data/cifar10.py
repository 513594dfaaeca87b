"""CIFAR-10 from a folder, in either of its official layouts, verified before use.

`cifar-10-batches-bin` contains records of one label byte and 3072 pixel bytes. `cifar-10-batches-py`
contains pickles, which are read without running any code that they name. Both give the same arrays, and
`load` compares their SHA-256 with the official one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error
from mpiddp.train.data import cifar10_pickle
from mpiddp.train.data.arrays import ArrayDataset, ImageArrays, sha256
from mpiddp.train.data.cifar10_pickle import Recorded

NAME = "cifar10"
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCHES = ("test_batch",)
IMAGES_PER_BATCH = 10_000
RECORD_BYTES = 1 + 3 * 32 * 32
# The official pickles have 31 MB. Python 3 writes a pixel above 127 as two bytes.
_MAX_PICKLE_BYTES = 64 << 20

# The SHA-256 of the arrays, see arrays.sha256. They were decoded from batches whose own SHA-256 are
# those of the official archive (data_batch_1.bin: cee91656…, test_batch.bin: 8e2eb146…).
SHA256 = "6b3883dca6c867f1e58def548c063d1865569b8575fcbce06b3e468a89f9895a"

_HINT = "remove {} and run again to download it again."

# Labels [10000] and pixels [10000, 3 × 1024], the planes red, green and blue one after another.
_Batch = tuple[NDArray[Any], NDArray[np.uint8]]


@dataclass(frozen=True)
class Layout:
    """One official layout of the six batches: the name of their folder and their suffix."""

    folder_name: str
    suffix: str
    read_batch: Callable[[Path], _Batch]

    def files(self, folder: Path) -> list[Path]:
        return [folder / f"{name}{self.suffix}" for name in TRAIN_BATCHES + TEST_BATCHES]


def find(folder: Path) -> tuple[Path, Layout] | None:
    """The folder of CIFAR-10's batches and their layout: below `folder` or `folder` itself; else None."""
    candidates = [(folder / layout.folder_name, layout) for layout in (BIN, PY)]
    candidates += [(folder, layout) for layout in (BIN, PY)]
    for candidate, layout in candidates:
        if any(file.exists() for file in layout.files(candidate)):
            return candidate, layout
    return None


def load(folder: Path) -> ArrayDataset:
    """Load CIFAR-10 from `folder`: 50,000 + 10,000 images [N, 32, 32, 3] in the official order.

    Raises UserError if the data is missing, incomplete, or not CIFAR-10.
    """
    found = find(folder)
    if found is None:
        raise UserError(
            f"{folder}: no CIFAR-10 here; expected {BIN.folder_name} (data_batch_1.bin …) "
            f"or {PY.folder_name} (data_batch_1 …) in it"
        )
    batches, layout = found
    dataset = read(batches, layout)
    digest = sha256(dataset)
    if digest != SHA256:
        raise UserError(
            f"{batches}: the SHA-256 of its images and labels is {digest}; "
            f"CIFAR-10's is {SHA256}; {_HINT.format(batches)}"
        )
    return dataset


def read(folder: Path, layout: Layout) -> ArrayDataset:
    """Read the six batches in `folder` without verifying them.

    Raises:
        UserError: one is missing, or not of CIFAR-10.
        JobFailed: a disk has failed.
    """
    files = layout.files(folder)
    try:
        train = _assemble([layout.read_batch(file) for file in files[: len(TRAIN_BATCHES)]])
        test = _assemble([layout.read_batch(file) for file in files[len(TRAIN_BATCHES) :]])
    except OSError as error:
        if cause_of(error) is JobFailed:
            raise read_error(str(folder), error) from None
        raise UserError(f"{error.filename}: {error.strerror}; {_HINT.format(folder)}") from None
    return ArrayDataset(name=NAME, num_classes=10, train=train, test=test)


def _assemble(batches: list[_Batch]) -> ImageArrays:
    images = np.empty((len(batches), IMAGES_PER_BATCH, 32 * 32, 3), np.uint8)
    for batch_images, (_, pixels) in zip(images, batches, strict=True):
        planes = pixels.reshape(IMAGES_PER_BATCH, 3, 32 * 32)
        for channel in range(3):  # five times as fast as one transpose
            batch_images[:, :, channel] = planes[:, channel]
    labels = np.concatenate([labels for labels, _ in batches]).astype(np.int64)
    return ImageArrays(images.reshape(-1, 32, 32, 3), labels)


def _read_bin_batch(file: Path) -> _Batch:
    size, expected = file.stat().st_size, IMAGES_PER_BATCH * RECORD_BYTES
    if size != expected:
        raise UserError(
            f"{file} has {size:,} bytes instead of {expected:,}; {_HINT.format(file.parent)}"
        )
    records = np.fromfile(file, np.uint8, expected).reshape(IMAGES_PER_BATCH, RECORD_BYTES)
    return records[:, 0], records[:, 1:]


def _read_py_batch(file: Path) -> _Batch:
    if file.stat().st_size > _MAX_PICKLE_BYTES or not file.is_file():
        raise UserError(
            f"{file} is not a file of at most {_MAX_PICKLE_BYTES:,} bytes; "
            f"{_HINT.format(file.parent)}"
        )
    try:
        batch = cifar10_pickle.loads(file.read_bytes())
        labels, pixels = np.array(batch[b"labels"], np.int64), _as_array(batch[b"data"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: not one of CIFAR-10's batches ({error}); {_HINT.format(file.parent)}"
        ) from None
    if labels.shape != (IMAGES_PER_BATCH,) or pixels.shape != (IMAGES_PER_BATCH, 3 * 32 * 32):
        raise UserError(
            f"{file} has {labels.shape} labels and {pixels.shape} pixels instead of (10000,) "
            f"and (10000, 3072); {_HINT.format(file.parent)}"
        )
    return labels, pixels


def _as_array(recorded: Recorded) -> NDArray[np.uint8]:
    """The uint8 array that a pickle describes. Raises ValueError if it describes anything else."""
    _version, shape, dtype, is_fortran, raw = recorded.state
    if dtype.arguments[0] not in (b"u1", "u1") or is_fortran:
        raise ValueError(f"its pixels are {dtype.arguments[0]!r:.40} instead of 'u1' in C order")
    array: NDArray[np.uint8] = np.frombuffer(raw, np.uint8).reshape(shape)
    return array


BIN = Layout("cifar-10-batches-bin", ".bin", _read_bin_batch)
PY = Layout("cifar-10-batches-py", "", _read_py_batch)
