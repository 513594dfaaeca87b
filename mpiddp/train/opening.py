"""Find, fetch and open the data set of a training: from its row in `datasets` to batches on the device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from mpiddp.errors import UserError
from mpiddp.protocol.variables import DATA
from mpiddp.text import shown
from mpiddp.train.config import TrainConfig
from mpiddp.train.data.arrays import ImageArrays
from mpiddp.train.data.dataset import Batch, Data
from mpiddp.train.data.datasets import DATASETS, DatasetSpec, find
from mpiddp.train.data.device_images import DeviceImages
from mpiddp.train.data.image_folder import ImageFolder
from mpiddp.train.data.low_resolution import at_low_resolution
from mpiddp.train.data.prefetch import prefetched
from mpiddp.train.data.synthetic import SyntheticImages
from mpiddp.train.order import Step
from mpiddp.world import World


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


def data_dir(config: TrainConfig) -> Path:
    """The folder of the data set.

    Raises:
        UserError: the user has named a folder that does not exist.
    """
    is_folder_of_images = not DATASETS[config.dataset].layouts
    if config.data_dir is None:
        if is_folder_of_images:
            raise UserError(
                f"--dataset {config.dataset} needs --data-dir DIR, with train/ and val/."
            )
        return default_data_dir()
    folder = Path(config.data_dir)
    if not folder.is_dir():
        problem, hint = (
            ("is not a folder", "Name a folder") if folder.exists() else ("is missing", "Create it")
        )
        rest = "." if is_folder_of_images else ", or leave the option out."
        raise UserError(f"--data-dir {folder} {problem} (looked in {Path.cwd()}). {hint}{rest}")
    return folder


def prepare(config: TrainConfig) -> None:
    """Download the data set if it is missing. One rank of each host calls this; the others wait."""
    spec = DATASETS[config.dataset]
    if spec.fetch is not None and not config.use_syn:
        folder = data_dir(config)
        if find(spec, [folder]) is None:
            spec.fetch(folder)


def open_data(config: TrainConfig, world: World, device: torch.device) -> Data:
    """Open the data set on the device.

    Raises:
        UserError: the data set is missing or invalid.
    """
    spec = DATASETS[config.dataset]
    if config.image_size and spec.layouts:
        raise UserError(
            f"--image-size applies to image folders only; {config.dataset} images are "
            f"{spec.size} pixels wide."
        )
    size = config.image_size or spec.size
    if config.use_syn:
        return _synthetic(config, world, device, size)
    if not spec.layouts:
        return _image_folder(config, device, size)
    folders = [data_dir(config)]
    if spec.system_folder and not config.data_dir:
        folders.append(spec.system_folder)
    train, test = (
        DeviceImages(
            arrays,
            device,
            mean=spec.mean,
            std=spec.std,
            augment=augment,
            max_shift=config.max_shift,
            seed=config.seed,
            channels_last=config.channels_last,
        )
        for arrays, augment in zip(load(spec, *folders), (True, False), strict=True)
    )
    return Data(config.dataset, spec.num_classes, (spec.channels, size, size), train, test)


def load(spec: DatasetSpec, *folders: Path) -> tuple[ImageArrays, ImageArrays]:
    """Load the images for training and those for testing from the first folder that has any file of them.

    Raises:
        UserError: no folder has one, or the files are damaged or of another data set.
        JobFailed: a disk has failed.
    """
    found = find(spec, folders)
    if found is None:
        names = " or ".join(", ".join(layout.files) for layout in spec.layouts)
        looked = [f / sub for f in folders for sub in ("", *(each.folder for each in spec.layouts))]
        way = "."
        if spec.system_folder in folders:
            way = f", or: {spec.hint}"
        elif spec.system_folder or spec.fetch:  # looked for only where the user names no folder
            way = ", or leave --data-dir out."
        raise UserError(
            f"no {spec.title} ({names}) in {', '.join(map(str, looked))}; "
            f"copy the files into one of them{way}"
        )
    folder, layout = found
    train, test = layout.read([folder / name for name in layout.files])
    expected = (spec.size, spec.size, spec.channels)
    for purpose, images, labels in (
        ("training", train.images, train.labels),
        ("testing", test.images, test.labels),
    ):
        if images.shape[1:] != expected:
            found_size, right_size = (
                " × ".join(map(str, size)) for size in (images.shape[1:], expected)
            )
            raise UserError(
                f"{folder}: its images have {found_size} values; expected {right_size}."
            )
        if not len(labels):
            raise UserError(f"{folder}: there are no images for {purpose}.")
        if labels.max() >= spec.num_classes:
            raise UserError(
                f"{folder}: label {labels.max()} is not one of 0 to {spec.num_classes - 1}."
            )
    return train, test


def batches_of(
    steps: Sequence[Step], data: Data, config: TrainConfig, device: torch.device, *, epoch: int
) -> Iterator[Batch]:
    """The images for these steps of an epoch, on the device: a batch for each backward pass."""
    order = [numbers for step in steps for numbers in step.micro_batches]
    batches = prefetched(data.train.batches(order, epoch=epoch), device)
    return at_low_resolution(batches) if epoch < config.low_res_epochs else batches


def _synthetic(config: TrainConfig, world: World, device: torch.device, size: int) -> Data:
    spec = DATASETS[config.dataset]
    train = SyntheticImages(
        device,
        num_images=spec.num_images,
        num_classes=spec.num_classes,
        shape=(spec.channels, size, size),
        batch_size=config.batch_size,
        seed=config.seed,
        rank=world.rank,
        channels_last=config.channels_last,
    )
    name = f"synthetic {config.dataset}"
    return Data(name, spec.num_classes, (spec.channels, size, size), train, None)


def _image_folder(config: TrainConfig, device: torch.device, size: int) -> Data:
    folder = data_dir(config)
    train, test = (
        ImageFolder(
            folder / split,
            device,
            image_size=size,
            augment=augment,
            seed=config.seed,
            num_workers=config.num_workers,
            keep_workers=augment,  # evaluations are rare, and idle workers cost memory
            channels_last=config.channels_last,
        )
        for split, augment in (("train", True), ("val", False))
    )
    if test.classes != train.classes:
        one_sided = sorted({*train.classes} ^ {*test.classes})[0]
        raise UserError(
            f"{folder}: train/ and val/ contain different classes. {shown(one_sided)} is in one "
            "of them."
        )
    digest = sha256("\n".join([*train.names(), *test.names()]).encode(errors="surrogateescape"))
    return Data(
        folder.resolve().name,
        len(train.classes),
        (3, size, size),
        train,
        test,
        digest.hexdigest()[:16],
    )
