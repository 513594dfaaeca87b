"""A folder of images in ImageNet's layout: train/CLASS/*.jpg and val/CLASS/*.jpg.

Decoding and cropping happen in DataLoader workers, normalization on the device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpiddp.errors import UserError
from mpiddp.train.data.source import Batch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
# What Pillow raised over thousands of damaged files; its UnidentifiedImageError is an OSError.
_UNREADABLE = (OSError, EOFError, SyntaxError, ValueError, Image.DecompressionBombError)
RESIZE = 256 / 224  # the shorter side before the center crop, as the field evaluates ImageNet


class ImageFolder:
    """One split of the folder as a source."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        image_size: int,
        augment: bool,
        seed: int = 0,
        num_workers: int = 4,
        channels_last: bool = True,
    ) -> None:
        self.classes = class_names(folder)
        self.samples = tuple(
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        )
        if not self.samples:
            raise UserError(f"{folder}: no images ({', '.join(sorted(SUFFIXES))}) in its folders.")
        self.num_images = len(self.samples)
        self.num_workers = num_workers
        self.device = device
        self.decoder = _Decoder(self.samples, image_size, augment, seed)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        std = torch.tensor(STD, device=device).view(3, 1, 1)
        self._scale = 1 / (255 * std)
        self._shift = -torch.tensor(MEAN, device=device).view(3, 1, 1) / std

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        loader = DataLoader(
            self.decoder,
            batch_sampler=[[(int(number), epoch) for number in batch] for batch in indices],
            num_workers=min(self.num_workers, len(indices)),
            pin_memory=self.device.type != "cpu",
            generator=torch.Generator(),  # else it would draw its workers' seeds from the rank's own
        )
        for images, labels in _in_one_sentence(loader):
            images = images.to(self.device, non_blocking=True)
            images = images * self._scale + self._shift
            yield (
                images.contiguous(memory_format=self.memory_format),
                labels.to(self.device, non_blocking=True),
            )


def _in_one_sentence(loader: DataLoader[tuple[Tensor, int]]) -> Iterator[Batch]:
    """The loader's batches; what is wrong in a worker comes with its traceback, and loses it here."""
    try:
        yield from loader
        return
    except UserError as error:
        name = f"{UserError.__module__}.{UserError.__qualname__}: "
        sentence = str(error).rpartition(name)[2].strip()
        error.__traceback__ = None  # it holds the loader, which would wait 5 s for each worker
    raise UserError(sentence)


def class_names(folder: Path) -> tuple[str, ...]:
    """The folder's classes: its subfolders in sorted order, as torchvision numbers them.

    Raises:
        UserError: no such folder, or no subfolders in it.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is missing. Expected ImageNet's layout: train/CLASS/*.jpg, val/CLASS/*.jpg."
        )
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    if not names:
        raise UserError(f"{folder}: no folders in it. Expected one per class, with its images.")
    return names


class _Decoder(Dataset[tuple[Tensor, int]]):
    """(image number, epoch) to a uint8 image [3, size, size] and its label."""

    def __init__(
        self, samples: tuple[tuple[Path, int], ...], size: int, augment: bool, seed: int
    ) -> None:
        self.samples, self.size, self.augment, self.seed = samples, size, augment, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        number, epoch = key
        path, label = self.samples[number]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except _UNREADABLE as error:
            raise UserError(
                f"{path}: Pillow cannot read it ({error}). Replace or remove it."
            ) from None
        if self.augment:
            # Of its own number, so that neither workers nor ranks nor a resume change the draw.
            image = random_resized_crop(
                image, self.size, random.Random(f"{self.seed}/{epoch}/{number}")
            )
        else:
            image = center_crop(image, self.size)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


def random_resized_crop(image: Image.Image, size: int, draw: random.Random) -> Image.Image:
    """A random 8 to 100 % of the area at an aspect ratio of 3/4 to 4/3, maybe mirrored.

    The recipe of Szegedy et al. 2014 ("Going Deeper with Convolutions", section 6).
    """
    width, height = image.size
    box = (0, 0, width, height)
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            box = (left, top, left + w, top + h)
            break
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The middle of the image, its shorter side scaled to size · 256/224 first."""
    width, height = image.size
    side = min(width, height) / RESIZE
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
