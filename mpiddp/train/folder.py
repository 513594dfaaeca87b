"""A folder of images in ImageNet's layout, train/CLASS/*.jpg and val/CLASS/*.jpg.

DataLoader workers decode and crop the images, which the caller requests by number and epoch. So neither the
number of workers nor a resume changes an image.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import random
import select
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.train.config import Config

Key = tuple[int, int]  # image number, epoch
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1]
RESIZE = 256 / 224  # the shorter side before the center crop, the usual evaluation on ImageNet
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
# Pillow recognizes a file by its contents, whatever its suffix: ImageNet has a PNG that is named .JPEG. It
# reads some formats with other programs: EPS with Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
# Pillow refuses images of more than 179 million pixels, and would warn of each with more than half of that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
log = logging.getLogger("mpiddp")

IGNORED = -100  # the label of an image that was skipped: cross_entropy leaves it out
_LOOK_S = 1.0  # between two looks whether the rank lives


def open_folder(
    folder: Path, config: Config, device: torch.device
) -> tuple[ImageFolder, ImageFolder, str]:
    """The splits for training and testing, and the hash of the names and labels of their files."""
    train = ImageFolder(folder / "train", config, device, augment=True)
    test = ImageFolder(folder / "val", config, device, augment=False)
    if one_sided := {*train.classes} ^ {*test.classes}:
        raise UserError(
            f"{folder}: train/ and val/ contain different classes. {min(one_sided)} is in one of them."
        )
    names = ("/".join(path.split("/")[-2:]) for path, _ in (*train.samples, *test.samples))
    content = "\n".join(names).encode(errors="surrogateescape")
    return train, test, sha256(content).hexdigest()[:16]


class ImageFolder:
    """One split of the folder: its classes, and (path, label) of its images."""

    def __init__(self, folder: Path, config: Config, device: torch.device, *, augment: bool):
        if not folder.is_dir():
            raise UserError(
                f"{folder} is missing. Expected ImageNet's layout: train/CLASS/*.jpg, val/CLASS/*.jpg."
            )
        # Numbered as in torchvision. macOS leaves a hidden file beside each one in an archive.
        entries = sorted(each for each in folder.glob("[!.]*") if each.is_dir())
        self.classes = tuple(each.name for each in entries)
        self.samples = tuple(  # paths as strings, which are smaller to pickle for unforked workers
            (f"{entry}/{name}", label)
            for label, entry in enumerate(entries)
            # A million paths of pathlib would take 5 s.
            for name in sorted(each.name for each in os.scandir(entry))
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        )
        with_images = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in with_images]
        if empty or not self.classes:
            raise UserError(
                f"{folder}: {f'the folder {empty[0]}' if empty else 'it'} contains no images "
                f"({', '.join(SUFFIXES)}). Each folder there is a class."
            )
        self.num_images = len(self.samples)
        self.device, self._config = device, config
        mean, std = (torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self._decoder = _Decoder(self.samples, config, augment=augment)
        self._order: list[list[Key]] = []  # of the epoch
        self._skipped: set[str] = set()  # a sentence for each image

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, float [N, C, H, W], and labels, int64 [N], decoded by the workers."""
        if not indices:
            return
        self._order[:] = [[(number, epoch) for number in batch.tolist()] for batch in indices]
        for images, labels, problems in self._loader:
            for problem in problems:
                if not self._config.skip_bad_images or isinstance(problem, JobFailed):
                    raise problem
                self._skipped.add(str(problem))
                log.warning(
                    f"warning: {problem} Skipped: {len(self._skipped)} on this rank so far."
                )
            images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)  # channels_last
            yield images * self._scale + self._shift, labels.to(self.device, non_blocking=True)

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
    # A forkserver lives as long as its workers, so the end of their parent would never tell them.
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        ended = os.pidfd_open(rank)
        while not select.select([ended], [], [], 0)[0]:
            received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
            if received is not None and received.si_pid == rank:
                break
    os._exit(0)


class _Decoder(torch.utils.data.Dataset[Any]):
    """Maps the keys of a batch to its images, uint8 [N, size, size, 3], and labels [N].

    The third part of a batch are the errors of its images that cannot be read: raised in a worker, they
    would lose their type. Such an image is black, and its label is IGNORED.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], config: Config, *, augment: bool):
        self.samples, self.config, self.augment = samples, config, augment

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor, list[Exception]]:
        size, seed = self.config.image_size, self.config.seed
        images = torch.zeros(len(keys), size, size, 3, dtype=torch.uint8)
        labels = torch.empty(len(keys), dtype=torch.int64)
        pixels, problems = images.numpy(), list[Exception]()
        for position, (number, epoch) in enumerate(keys):
            path, labels[position] = self.samples[number]
            # The image's number seeds the draw, so it does not depend on workers, ranks or a resume.
            draw = random.Random(f"{seed}/{epoch}/{number}") if self.augment else None
            try:
                pixels[position] = read_image(path, size, draw)
            except Exception as error:  # Pillow raises a dozen types for damaged files
                labels[position] = IGNORED
                problems.append(self._problem(path, error))
        return images, labels, problems

    def _problem(self, path: str, error: Exception) -> Exception:
        """The error of the job for that of an image: a disk may have failed, or the image is bad."""
        if isinstance(error, OSError) and error.errno:  # Pillow's own errors have none
            kind, reason = cause_of(error), os.strerror(error.errno)
        else:
            kind, reason = UserError, str(error)
        can_skip = kind is UserError and not self.config.skip_bad_images
        hint = " Replace it, or use --skip-bad-images." if can_skip else ""
        return kind(f"{path}: the image cannot be read ({reason}).{hint}")


def read_image(path: str, size: int, draw: random.Random | None) -> Image.Image:
    """The image at size × size: a part that is drawn, mirrored or not; without `draw` its middle."""
    with Image.open(path, formats=FORMATS) as file:
        width, height = file.size
        left, top, right, bottom = (
            draw_box(width, height, draw) if draw else middle_box(width, height)
        )
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, in less time. The crop stays large enough.
        file.draft(
            "RGB",
            (math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))),
        )
        x, y = file.size[0] / width, file.size[1] / height
        if file.mode.startswith("I"):  # 16 bits of grey, of which Pillow would keep the lowest 8
            image = Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
        else:
            image = file.convert("RGB")
    box = (left * x, top * y, right * x, bottom * y)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    mirrors = draw is not None and draw.random() < 0.5
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrors else image


def draw_box(width: int, height: int, draw: random.Random) -> tuple[float, float, float, float]:
    """A random 8 to 100 % of the area at an aspect ratio of 3/4 to 4/3: left, top, right, bottom.

    This follows Szegedy et al. 2014 ("Going Deeper with Convolutions", section 6).
    """
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    """The middle of an image whose shorter side would be scaled to size · 256/224."""
    side = min(width, height) / RESIZE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
