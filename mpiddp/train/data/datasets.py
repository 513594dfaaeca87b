"""The data sets of `mpiddp train --dataset`: one row each, with everything that is particular to it.

This module imports neither torch nor numpy, so --help and option errors appear at once; the functions of a
row import what they need. `mpiddp.train.opening` opens a row's data on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp.train.data import cifar10_files

if TYPE_CHECKING:
    from mpiddp.train.data.arrays import ImageArrays

    Splits = tuple[ImageArrays, ImageArrays]  # for training, for testing


@dataclass(frozen=True)
class Layout:
    """The files of a data set, in the data folder itself or in its subfolder `folder`.

    `read` gets the paths of `files`, in their order. It raises UserError for a missing or damaged file,
    and JobFailed for a disk that fails.
    """

    folder: str
    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Splits]


@dataclass(frozen=True)
class DatasetSpec:
    """One data set: its sizes, which --use-syn imitates, and how its files are found, fetched and read."""

    title: str
    num_images: int  # for training
    num_classes: int
    channels: int
    size: int  # pixels: the images are square
    mean: tuple[float, ...]  # of pixels in [0, 1], one number for each channel
    std: tuple[float, ...]
    layouts: tuple[Layout, ...] = ()  # none: a folder of images, decoded as they are needed
    fetch: Callable[[Path], None] | None = None  # downloads the files into the data folder
    system_folder: Path | None = None  # where a package of the system puts the files
    hint: str = ""  # the command that installs this package


def _read_cifar10_bin(files: Sequence[Path]) -> Splits:
    from mpiddp.train.data import cifar10

    return cifar10.read_bin(files)


def _read_cifar10_py(files: Sequence[Path]) -> Splits:
    from mpiddp.train.data import cifar10

    return cifar10.read_py(files)


def _fetch_cifar10(folder: Path) -> None:
    from mpiddp.train.data import cifar10_fetch

    cifar10_fetch.fetch(folder, print)


def _read_idx(files: Sequence[Path]) -> Splits:
    from mpiddp.train.data import idx

    return idx.read(files)


MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

DATASETS = {
    "cifar10": DatasetSpec(
        "CIFAR-10",
        num_images=50_000,
        num_classes=10,
        channels=3,
        size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        layouts=(
            Layout(cifar10_files.BIN_FOLDER, tuple(cifar10_files.BIN), _read_cifar10_bin),
            Layout(cifar10_files.PY_FOLDER, tuple(cifar10_files.PY), _read_cifar10_py),
        ),
        fetch=_fetch_cifar10,
    ),
    "fashion-mnist": DatasetSpec(
        "Fashion-MNIST",
        num_images=60_000,
        num_classes=10,
        channels=1,
        size=28,
        mean=(0.2860,),
        std=(0.3530,),
        layouts=(Layout("fashion-mnist", MNIST_FILES, _read_idx),),
        system_folder=Path("/usr/share/datasets/fashion-mnist"),
        hint="apt-get install dataset-fashion-mnist",
    ),
    "image-folder": DatasetSpec(
        "an image folder",
        num_images=1_281_167,  # of ILSVRC 2012; those of a real folder are counted, as its classes
        num_classes=1000,
        channels=3,
        size=224,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
}


def find(spec: DatasetSpec, folders: Sequence[Path]) -> tuple[Path, Layout] | None:
    """The first folder with any of the data set's files, and their layout; None if there is none.

    A folder with some of the files is found too: reading it names the file that is missing.
    """
    for folder, layout in ((each, layout) for each in folders for layout in spec.layouts):
        for candidate in (folder, folder / layout.folder):
            if any((candidate / name).exists() for name in layout.files):
                return candidate, layout
    return None
