"""Decode image files to a batch of pixels, in the workers of a DataLoader.

A worker decodes directly into the memory of a batch and reuses a few batches in turn. It allocates
neither a tensor per image nor new shared memory per batch.
"""

from __future__ import annotations

import math
import os
import random
import struct
import warnings
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from mpiddp.errors import JobFailed
from mpiddp.paths import cause_of

PREFETCH = 2  # batches that a worker prepares ahead
RESIZE = 256 / 224  # the shorter side before the center crop, the usual evaluation on ImageNet
# Pillow raised these errors for thousands of damaged files. Its UnidentifiedImageError is an OSError.
_UNREADABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, struct.error),
    Image.DecompressionBombError,
)
# Pillow recognizes a file by its contents, whatever its name, and reads some formats with other programs:
# EPS with Ghostscript. A file of one of these formats may have the suffix of another, as some of ImageNet's.
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
_FORMATS = tuple(dict.fromkeys(FORMATS.values()))
# Pillow refuses images of more than 179 million pixels, and would warn of each with more than half of that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

Key = tuple[int, int]  # image number, epoch


class Broken(NamedTuple):
    """A file that cannot be read. Workers send it to their rank, because an exception would lose its type."""

    path: str
    reason: str
    is_failure: bool  # a machine failed, a disk or a file server: the image may be intact


Decoded = tuple[Tensor, Tensor, Broken | None]


class Decoder(Dataset[Decoded]):
    """Maps the keys of a batch to its images, uint8 [N, 3, size, size] as channels_last, and labels [N].

    The third part of a batch is its first image that cannot be read. Then the others mean nothing.

    A later batch reuses the memory of the images: in a worker after PREFETCH + 1 other batches have been
    requested, outside of workers at the next batch.
    """

    def __init__(
        self,
        samples: tuple[tuple[str, int], ...],
        size: int,
        *,
        augment: bool,
        seed: int,
    ) -> None:
        self.samples, self.size, self.augment, self.seed = samples, size, augment, seed
        self._memory: list[Tensor] = []  # of one process

    def __getitems__(self, keys: list[Key]) -> Decoded:
        batch = self._next_memory(len(keys))
        pixels = batch.numpy()
        labels = torch.empty(len(keys), dtype=torch.int64)
        broken = None
        for position, (number, epoch) in enumerate(keys):
            path, labels[position] = self.samples[number]
            try:
                image = _opened(path)
            except _UNREADABLE as error:
                broken = _broken(path, error)
                break
            pixels[position] = self._cropped(image, number, epoch)
        return batch.permute(0, 3, 1, 2), labels, broken

    def _next_memory(self, num_images: int) -> Tensor:
        """Unused memory: uint8 [num_images, size, size, 3]."""
        in_worker = torch.utils.data.get_worker_info() is not None
        # The rank reads one batch while the worker prepares PREFETCH others and decodes one more.
        if len(self._memory) < (PREFETCH + 2 if in_worker else 1):
            memory = torch.empty(0, dtype=torch.uint8)
        else:
            memory = self._memory.pop(0)
        if len(memory) < num_images:
            memory = torch.empty(num_images, self.size, self.size, 3, dtype=torch.uint8)
            if in_worker:
                memory.share_memory_()
        self._memory.append(memory)
        return memory[:num_images]

    def _cropped(self, image: Image.Image, number: int, epoch: int) -> Image.Image:
        if not self.augment:
            return center_crop(image, self.size)
        # The image's number seeds the draw, so it does not depend on workers, ranks or a resume.
        draw = random.Random(f"{self.seed}/{epoch}/{number}")
        return random_resized_crop(image, self.size, draw)


def _opened(path: str) -> Image.Image:
    with Image.open(path, formats=_FORMATS) as file:
        return _in_rgb(file)


def _broken(path: str, error: Exception) -> Broken:
    """Why the file cannot be read. Pillow's own errors have no number, those of the system do."""
    if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
        return Broken(path, os.strerror(error.errno), is_failure=True)
    return Broken(path, str(error), is_failure=False)


def _in_rgb(file: Image.Image) -> Image.Image:
    """The image with 8 bits per color."""
    if file.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip at 255
        return Image.fromarray((np.asarray(file) // 257).astype(np.uint8)).convert("RGB")
    return file.convert("RGB")


def random_resized_crop(image: Image.Image, size: int, draw: random.Random) -> Image.Image:
    """Crop a random 8 to 100 % of the area at an aspect ratio of 3/4 to 4/3, and mirror half of the images.

    This follows Szegedy et al. 2014 ("Going Deeper with Convolutions", section 6).
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
    """Crop the middle of the image after its shorter side is scaled to size · 256/224."""
    width, height = image.size
    side = min(width, height) / RESIZE
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
