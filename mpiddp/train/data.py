"""The data of a training: an ordered stream of batches on the device, whatever the source.

    data = open_data(config, device)
    for images, labels in batches(data.train, order.steps(epoch=0), config, epoch=0): …

CIFAR-10 stays on the device as one uint8 tensor, and a batch is selected by an index. The device crops,
flips and normalizes a whole batch at once, so a step waits for neither workers nor copies. `folder` is for a
folder of images, which workers decode. The caller requests images by number, so only `order` decides their
order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mpiddp.errors import UserError
from mpiddp.train import cifar10
from mpiddp.train.config import Config
from mpiddp.train.folder import open_folder

Batch = tuple[Tensor, Tensor]  # float [N, C, H, W] normalized, int64 [N]
POOL_BATCHES = 4  # of synthetic images


class Dataset(Protocol):
    """Labelled images, numbered from 0 to num_images - 1, which it delivers on the device."""

    num_images: int
    device: torch.device

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        """Yield one batch for every tensor of `indices` (int64 [N], on the CPU), in their order.

        The randomness of a data set for training depends only on its seed, the epoch and the image's number,
        not on the rank or on earlier batches.
        """


@dataclass(frozen=True)
class Data:
    """A data set as opened by this rank. `test` is None if the data set has no test images."""

    name: str
    num_classes: int
    train: Dataset
    test: Dataset | None
    digest: str = ""  # of the names and labels of an image folder's files

    @property
    def contents(self) -> str:
        """A description that must be equal on all ranks and in a resumed run, whatever the path."""
        test = self.test.num_images if self.test else 0
        names = f", names {self.digest}" if self.digest else ""
        return f"{self.train.num_images} + {test} images of {self.num_classes} classes{names}"


def default_data_dir() -> Path:
    """The folder of data unless --data-dir names another: $MPIDDP_DATA, else the user's cache."""
    if named := os.environ.get("MPIDDP_DATA"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mpiddp"
    except RuntimeError:  # a container's user without an entry in /etc/passwd
        raise UserError(
            "no folder for data: HOME is not set. Name one: --data-dir DIR, or MPIDDP_DATA=DIR."
        ) from None


def data_dir(config: Config) -> Path:
    """The folder of the data set. Raises UserError if the user has named one that does not exist."""
    if config.data_dir is None:
        if config.dataset == "image-folder":
            raise UserError("--dataset image-folder needs --data-dir DIR, with train/ and val/.")
        return default_data_dir()
    if not Path(config.data_dir).is_dir():
        raise UserError(f"--data-dir {config.data_dir} is not a folder (looked in {Path.cwd()}).")
    return Path(config.data_dir)


def prepare(config: Config) -> None:
    """Download the data set if it is missing. One rank of each host calls this; the others wait."""
    if config.dataset == "cifar10" and not config.use_syn and not cifar10.find(data_dir(config)):
        cifar10.fetch(data_dir(config), partial(print, flush=True))


def open_data(config: Config, device: torch.device) -> Data:
    """Open the data set on the device. Raises UserError if it is missing or invalid."""
    is_folder = config.dataset == "image-folder"
    if config.use_syn:
        num_images, num_classes = (1_281_167, 1000) if is_folder else (50_000, 10)
        synthetic = SyntheticImages(config, device, num_images, num_classes)
        return Data(f"synthetic {config.dataset}", num_classes, synthetic, None)
    if is_folder:
        folder = data_dir(config)
        split, other, digest = open_folder(folder, config, device)
        return Data(folder.resolve().name, len(split.classes), split, other, digest)
    train, test = cifar10.read(data_dir(config))
    images = DeviceImages(*train, config, device, augment=True)
    return Data("cifar10", 10, images, DeviceImages(*test, config, device, augment=False))


def batches(
    dataset: Dataset, steps: Iterable[Sequence[Tensor]], config: Config, *, epoch: int
) -> Iterator[Batch]:
    """The images of these steps of an epoch, on the device: a batch for each backward pass.

    The epochs of --low-res-epochs have smaller images: a model learns the same shapes in less time. Howard
    trained so for DAWNBench (fast.ai, 2018), Tan and Le for EfficientNetV2 (2021).
    """
    indices = [numbers for micro_batches in steps for numbers in micro_batches]
    found = prefetched(dataset.batches(indices, epoch=epoch), dataset.device)
    side = config.image_side(epoch)
    if side == config.image_size:
        return found
    return ((F.adaptive_avg_pool2d(images, side), labels) for images, labels in found)


class DeviceImages:
    """Images uint8 [N, H, W, C] and labels [N] on `device`; shifted and flipped if `augment`."""

    def __init__(
        self, images: Any, labels: Any, config: Config, device: torch.device, *, augment: bool
    ) -> None:
        self.num_images, self.height, self.width, channels = images.shape
        self.augment, self.seed, self.max_shift = augment, config.seed, config.max_shift
        self.device = device
        self._pixels = torch.from_numpy(images).to(device).view(-1, channels)
        self._labels = torch.from_numpy(labels).to(device)
        mean, std = (torch.tensor(each, device=device) for each in (cifar10.MEAN, cifar10.STD))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self._rows = _mirrored(self.height, self.max_shift).to(device)
        self._columns = _mirrored(self.width, self.max_shift).to(device)

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        if not indices:
            return
        # Every image's row shift, column shift and flip: int64 [num_images, 3].
        draws = torch.tensor([self.max_shift, self.max_shift, 0]).expand(self.num_images, 3)
        if self.augment:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shifts = 2 * self.max_shift + 1
            uniform = torch.rand(self.num_images, 3, generator=generator, dtype=torch.float64)
            draws = (uniform * torch.tensor([shifts, shifts, 2])).long()
        draws = draws.to(self.device)
        # Copy the indices once per epoch, because each copy waits for the device.
        for numbers in torch.cat(list(indices)).to(self.device).split([len(i) for i in indices]):
            yield self._images(numbers, draws), self._labels[numbers]

    def _images(self, numbers: Tensor, draws: Tensor) -> Tensor:
        """The images of `numbers` [N]: float [N, C, H, W], normalized."""
        height, width, device = self.height, self.width, self.device
        down, right, flip = draws[numbers].unsqueeze(2).unbind(1)
        rows = self._rows[torch.arange(height, device=device) + down]
        columns = torch.arange(width, device=device)
        columns = self._columns[torch.where(flip == 1, width - 1 - columns, columns) + right]
        # The number of each pixel among all pixels. Gathering rows of C bytes gives [N, H, W, C],
        # which is the channels_last layout.
        pixels = ((numbers * height)[:, None] + rows)[:, :, None] * width + columns[:, None, :]
        images = self._pixels.index_select(0, pixels.view(-1))
        images = images.view(len(numbers), height, width, -1) * self._scale + self._shift
        return images.permute(0, 3, 1, 2)


def _mirrored(size: int, pad: int) -> Tensor:
    """Map positions [0, size + 2 · pad) of a padded line to positions of the line that it mirrors.

    Shifted images are those of He et al. 2015, section 4.2; the border is mirrored, not black.
    """
    return F.pad(torch.arange(float(size))[None], (pad, pad), mode="reflect")[0].long()


class SyntheticImages:
    """Standard normal images and uniform labels, different on every rank, to measure without data.

    Every request returns one of a pool of POOL_BATCHES batches. The number of the first image selects
    it, so a run that resumes in mid-epoch gets the same batches as an uninterrupted run.
    """

    def __init__(self, config: Config, device: torch.device, num_images: int, num_classes: int):
        self.num_images, self.num_classes, self.device = num_images, num_classes, device
        self._config = config

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        images, labels = self._pool
        for numbers in indices:
            start = int(numbers[0]) % POOL_BATCHES * self._config.batch_size
            end = start + len(numbers)
            yield images[start:end], labels[start:end]

    @cached_property
    def _pool(self) -> Batch:
        """Created at first use, after the sizes have been checked."""
        config, device = self._config, self.device
        draw = torch.Generator(device).manual_seed(config.seed * 1_000_003 + dist.get_rank())
        number, size = POOL_BATCHES * config.batch_size, config.image_size
        images = torch.randn((number, 3, size, size), generator=draw, device=device)
        labels = torch.randint(self.num_classes, (number,), generator=draw, device=device)
        return images.contiguous(memory_format=torch.channels_last), labels


# One stream for all epochs, because the allocator keeps separate memory for each stream.
_side_stream = cache(torch.cuda.Stream)


def prefetched(found: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches, whose copies and crops on the device run on a side stream.

    The host runs ahead of the device and requests a batch while an earlier step still computes. On the
    stream of the steps, a copy or a crop would wait for that step. Other accelerators than CUDA's and
    ROCm's do without.
    """
    if device.type != "cuda":
        yield from found
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # which copied the data set to the device
    while True:
        with torch.cuda.stream(side):
            batch = next(found, None)
        if batch is None:
            return
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in batch:
            # Otherwise the next batch could reuse its memory too early.
            tensor.record_stream(current)
        yield batch
