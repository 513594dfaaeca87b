"""A folder of images in ImageNet's layout: train/CLASS/*.jpg and val/CLASS/*.jpg.

DataLoader workers decode and crop; the device normalizes.

    mpiddp train --dataset image-folder --data-dir /data/imagenet
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import threading
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpiddp.errors import JobFailed, UserError
from mpiddp.train.config import memory_format

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1]
RESIZE = 256 / 224  # the shorter side before the center crop, the usual evaluation on ImageNet
# Pillow recognizes a file by its contents, whatever its name, and reads some formats with other programs:
# EPS with Ghostscript. A file of one of these formats may have the suffix of another, as some of ImageNet's.
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
# Pillow refuses images of more than 179 million pixels, and would warn of each with more than half of that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

Key = tuple[int, int]  # image number, epoch
_MISSING = (FileNotFoundError, PermissionError, IsADirectoryError)


def open_folder(
    folder: Path, config: Namespace, device: torch.device
) -> tuple[ImageFolder, ImageFolder, str]:
    """The splits for training and testing, and the hash of the names and labels of their files."""
    train = ImageFolder(folder / "train", config, device, augment=True)
    test = ImageFolder(folder / "val", config, device, augment=False)
    if test.classes != train.classes:
        one_sided = sorted({*train.classes} ^ {*test.classes})[0]
        raise UserError(
            f"{folder}: train/ and val/ contain different classes. {one_sided} is in one of them."
        )
    names = (
        f"{split.classes[label]}/{path.rpartition(os.sep)[2]}"
        for split in (train, test)
        for path, label in split.samples
    )
    content = "\n".join(names).encode(errors="surrogateescape")
    return train, test, sha256(content).hexdigest()[:16]


class ImageFolder:
    """One split of the folder, as a `mpiddp.train.datasets.Dataset`."""

    def __init__(self, folder: Path, config: Namespace, device: torch.device, *, augment: bool):
        if not folder.is_dir():
            raise UserError(
                f"{folder} is missing. Expected ImageNet's layout: train/CLASS/*.jpg, val/CLASS/*.jpg."
            )
        # Numbered as in torchvision. macOS leaves a hidden file beside each one in an archive.
        entries = [each for each in folder.iterdir() if not each.name.startswith(".")]
        self.classes = tuple(sorted(each.name for each in entries if each.is_dir()))
        self.samples = tuple(  # paths as strings, which are smaller to pickle for unforked workers
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in FORMATS and not path.name.startswith(".")
        )
        with_images = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in with_images]
        if empty or not self.classes:
            raise UserError(
                f"{folder}: {f'the folder {empty[0]}' if empty else 'it'} contains no images "
                f"({', '.join(sorted(FORMATS))}). Each folder there is a class."
            )
        self.num_images = len(self.samples)
        self.device, self._config = device, config
        mean, std = (torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self._decoder = _Decoder(self.samples, config.image_size, config.seed, augment)
        self._order: list[list[Key]] = []  # of the epoch

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, float [N, C, H, W], and labels, int64 [N], decoded by the workers."""
        if not indices:
            return
        self._order[:] = [[(number, epoch) for number in batch.tolist()] for batch in indices]
        for images, labels, problem in self._loader:
            if problem is not None:
                raise problem
            images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            images = images * self._scale + self._shift
            images = images.contiguous(memory_format=memory_format(self._config))
            yield images, labels.to(self.device, non_blocking=True)

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        num_workers = self._config.num_workers
        # With a GPU the workers are not forked, because threads of CUDA and NCCL may hold a lock.
        method = "fork" if self.device.type == "cpu" else "forkserver"
        multiprocessing.set_forkserver_preload([__name__])  # else each worker would import torch
        return DataLoader(
            self._decoder,
            batch_sampler=self._order,
            collate_fn=tuple,  # the decoder delivers whole batches
            num_workers=num_workers,
            persistent_workers=self._decoder.augment and num_workers > 0,  # evaluations are rare
            multiprocessing_context=method if num_workers else None,
            worker_init_fn=partial(_leave_stops_to, os.getpid()),
            pin_memory=self.device.type != "cpu",
            generator=torch.Generator(),  # the workers' seeds must not come from the rank's RNG
        )


def _leave_stops_to(rank: int, _: int) -> None:
    """Initialize a worker: it leaves a stop to its rank, whose pid this is, and which may still save.

    A batch system sends SIGTERM to every process of a job. A worker that it ended would fail its rank.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_with(rank: int) -> None:
    """End this worker at its rank's own SIGTERM, which `terminate()` sends, or once the rank is gone."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank and Path(f"/proc/{rank}").exists():
        pass
    os._exit(0)


class _Decoder(Dataset[Any]):
    """Maps the keys of a batch to its images, uint8 [N, size, size, 3], and labels [N].

    The third part of a batch is the error of its first image that cannot be read: raised in a worker, it
    would lose its type.
    """

    def __init__(self, samples: tuple[tuple[str, int], ...], size: int, seed: int, augment: bool):
        self.samples, self.size, self.seed, self.augment = samples, size, seed, augment

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor, Exception | None]:
        images = torch.empty(len(keys), self.size, self.size, 3, dtype=torch.uint8)
        labels = torch.empty(len(keys), dtype=torch.int64)
        pixels = images.numpy()
        for position, (number, epoch) in enumerate(keys):
            path, labels[position] = self.samples[number]
            try:
                with Image.open(path, formats=tuple(FORMATS.values())) as file:
                    image = file.convert("RGB")
            except Exception as error:  # Pillow raises a dozen types for damaged files
                errno = getattr(error, "errno", None)  # Pillow's own errors have none
                reason = os.strerror(errno) if errno else str(error)
                sentence = f"{path}: the image cannot be read ({reason})."
                if errno and not isinstance(error, _MISSING):
                    return images, labels, JobFailed(sentence)
                return images, labels, UserError(f"{sentence} Replace or remove it.")
            # The image's number seeds the draw, so it does not depend on workers, ranks or a resume.
            draw = random.Random(f"{self.seed}/{epoch}/{number}")
            crop = partial(random_resized_crop, draw=draw) if self.augment else center_crop
            pixels[position] = crop(image, self.size)
        return images, labels, None


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
