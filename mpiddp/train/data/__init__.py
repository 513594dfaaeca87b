"""The data sets of `mpiddp train`, by name."""

from __future__ import annotations

import atexit
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from mpiddp.errors import UserError
from mpiddp.runtime.log import log
from mpiddp.train.config import TrainConfig
from mpiddp.train.data import cifar10, cifar10_fetch, fashion_mnist
from mpiddp.train.data.arrays import default_data_dir
from mpiddp.train.data.broken import BrokenImages
from mpiddp.train.data.device_images import DeviceImages
from mpiddp.train.data.image_folder import ImageFolder
from mpiddp.train.data.ram_cache import RamCache
from mpiddp.train.data.source import Data
from mpiddp.train.data.synthetic import SyntheticImages
from mpiddp.world import World


class _Spec(NamedTuple):
    """The sizes that --use-syn imitates, and the mean and std that normalize pixels in [0, 1]."""

    num_images: int
    num_classes: int
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


_SHAPES = {
    "cifar10": _Spec(50_000, 10, 3, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion-mnist": _Spec(60_000, 10, 1, 28, (0.2860,), (0.3530,)),
    # ILSVRC 2012; the images and classes of a real folder are counted instead
    "image-folder": _Spec(1_281_167, 1000, 3, 224, (), ()),
}


def data_dir(config: TrainConfig) -> Path:
    """The folder of the data set.

    Raises:
        UserError: the user has named a folder that does not exist.
    """
    if config.data_dir is None:
        if config.dataset == "image-folder":
            raise UserError("--dataset image-folder needs --data-dir DIR, with train/ and val/.")
        return default_data_dir()
    folder = Path(config.data_dir)
    if not folder.is_dir():
        problem, hint = (
            ("is not a folder", "Name a folder") if folder.exists() else ("is missing", "Create it")
        )
        rest = "." if config.dataset == "image-folder" else ", or leave the option out."
        raise UserError(f"--data-dir {folder} {problem} (looked in {Path.cwd()}). {hint}{rest}")
    return folder


def prepare(config: TrainConfig) -> None:
    """Download the data set if it is missing. One rank of each host calls this; the others wait."""
    if config.dataset == "cifar10" and not config.use_syn:
        cifar10_fetch.fetch(data_dir(config), print)


def open_data(config: TrainConfig, world: World, device: torch.device) -> Data:
    """Open the data set as sources on the device.

    Raises:
        UserError: the data set is missing or invalid.
    """
    shape = _SHAPES[config.dataset]
    size = config.image_size or shape.size
    if config.image_size and config.dataset != "image-folder":
        raise UserError(
            f"--image-size applies to image folders only; {config.dataset} images are "
            f"{shape.size} pixels wide."
        )
    if config.use_syn:
        return _synthetic(config, world, device, size)
    if config.dataset == "image-folder":
        return _image_folder(config, world, device, size)
    if config.dataset == "cifar10":
        arrays = cifar10.load(data_dir(config))
    else:
        elsewhere = () if config.data_dir else (fashion_mnist.DEBIAN_DIR,)
        arrays = fashion_mnist.load(data_dir(config), *elsewhere)
    train, test = (
        DeviceImages(
            split,
            device,
            mean=shape.mean,
            std=shape.std,
            augment=augment,
            seed=config.seed,
            channels_last=config.channels_last,
        )
        for split, augment in ((arrays.train, True), (arrays.test, False))
    )
    return Data(arrays.name, arrays.num_classes, (shape.channels, size, size), train, test)


def _synthetic(config: TrainConfig, world: World, device: torch.device, size: int) -> Data:
    shape = _SHAPES[config.dataset]
    train = SyntheticImages(
        device,
        num_images=shape.num_images,
        num_classes=shape.num_classes,
        shape=(shape.channels, size, size),
        batch_size=config.batch_size,
        seed=config.seed,
        rank=world.rank,
        channels_last=config.channels_last,
    )
    name = f"synthetic {config.dataset}"
    return Data(name, shape.num_classes, (shape.channels, size, size), train, None)


def _image_folder(config: TrainConfig, world: World, device: torch.device, size: int) -> Data:
    folder = data_dir(config)
    cache = None
    if config.cache == "ram":
        cache = RamCache(f"{world.master_addr}-{world.master_port}")  # unique to this job
        atexit.register(cache.close)
    broken = BrokenImages(config.skip_broken, log.warning)
    train, test = (
        ImageFolder(
            folder / split,
            device,
            image_size=size,
            augment=augment,
            seed=config.seed,
            num_workers=config.num_workers,
            keep_workers=augment,  # evaluations are rare, and idle workers cost memory
            cache=cache,
            channels_last=config.channels_last,
            broken=broken,
        )
        for split, augment in (("train", True), ("val", False))
    )
    if test.classes != train.classes:
        raise UserError(f"{folder}: train/ and val/ contain different classes.")
    digest = sha256("\n".join([*train.names(), *test.names()]).encode(errors="surrogateescape"))
    return Data(
        folder.resolve().name,
        len(train.classes),
        (3, size, size),
        train,
        test,
        digest.hexdigest()[:16],
    )
