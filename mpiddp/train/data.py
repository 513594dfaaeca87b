"""The data of a training: an ordered stream of batches on the device, whatever the source.

    data = open_data(config, device)
    for images, labels in batches(data.train, order.steps(epoch=0), config, epoch=0): …

CIFAR-10 stays on the device as one uint8 tensor, and a batch is selected by an index. The device crops,
flips and normalizes a whole batch at once, so a step waits for neither workers nor copies. DataLoader
workers decode and crop the images of a folder. The caller requests images by number, so only `order`
decides their order.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from mpiddp.errors import JobFailed, UserError
from mpiddp.train import cifar10
from mpiddp.train.config import Config

Batch = tuple[Tensor, Tensor]  # float [N, C, H, W] normalized, int64 [N]
Key = tuple[int, int]  # image number, epoch
POOL_BATCHES = 4  # of synthetic images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1]
RESIZE = 256 / 224  # the shorter side before the center crop, the usual evaluation on ImageNet
# Pillow recognizes a file by its contents, whatever its name, and reads some formats with other programs:
# EPS with Ghostscript. A file of one of these formats may have the suffix of another, as some of ImageNet's.
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
# Pillow refuses images of more than 179 million pixels, and would warn of each with more than half of that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
log = logging.getLogger("mpiddp")

_HINT = " Replace it, or use --skip-bad-images."
IGNORED = -100  # the label of an image that was skipped: cross_entropy leaves it out
_LOOK_S = 1.0  # between two looks whether the rank lives
_MISSING = (FileNotFoundError, PermissionError, IsADirectoryError)


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

    The first epochs of --low-res-epochs have 3/4 of the height and width: a model learns the same shapes in
    less time. Howard trained so for DAWNBench (fast.ai, 2018), Tan and Le for EfficientNetV2 (2021).
    """
    indices = [numbers for micro_batches in steps for numbers in micro_batches]
    found = prefetched(dataset.batches(indices, epoch=epoch), dataset.device)
    if epoch >= config.low_res_epochs:
        return found
    size = max(1, config.image_size * 3 // 4)
    return ((F.adaptive_avg_pool2d(images, size), labels) for images, labels in found)


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
    position = torch.arange(-pad, size + pad).abs()
    return torch.where(position < size, position, 2 * (size - 1) - position)


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


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all epochs, because the allocator keeps separate memory for each stream."""
    return torch.cuda.Stream(device)


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


# --- a folder of images, train/CLASS/*.jpg and val/CLASS/*.jpg ---


def open_folder(
    folder: Path, config: Config, device: torch.device
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
    """One split of the folder."""

    def __init__(self, folder: Path, config: Config, device: torch.device, *, augment: bool):
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
        self._skipped: set[str] = set()  # a sentence for each image

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, float [N, C, H, W], and labels, int64 [N], decoded by the workers."""
        if not indices:
            return
        self._order[:] = [[(number, epoch) for number in batch.tolist()] for batch in indices]
        for images, labels, problems in self._loader:
            self._report(problems)
            images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)  # channels_last
            yield images * self._scale + self._shift, labels.to(self.device, non_blocking=True)

    def _report(self, problems: list[Exception]) -> None:
        """Raise the first of these, unless --skip-bad-images allows them."""
        for problem in problems:
            if not self._config.skip_bad_images or isinstance(problem, JobFailed):
                raise problem
            sentence = str(problem).removesuffix(_HINT)
            self._skipped.add(sentence)
            log.warning(f"warning: {sentence} Skipped: {len(self._skipped)} on this rank so far.")

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

    def __init__(self, samples: tuple[tuple[str, int], ...], size: int, seed: int, augment: bool):
        self.samples, self.size, self.seed, self.augment = samples, size, seed, augment

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor, list[Exception]]:
        images = torch.zeros(len(keys), self.size, self.size, 3, dtype=torch.uint8)
        labels = torch.empty(len(keys), dtype=torch.int64)
        pixels, problems = images.numpy(), list[Exception]()
        for position, (number, epoch) in enumerate(keys):
            path, labels[position] = self.samples[number]
            # The image's number seeds the draw, so it does not depend on workers, ranks or a resume.
            draw = random.Random(f"{self.seed}/{epoch}/{number}") if self.augment else None
            try:
                pixels[position] = read_image(path, self.size, draw)
            except Exception as error:  # Pillow raises a dozen types for damaged files
                labels[position] = IGNORED
                errno = getattr(error, "errno", None)  # Pillow's own errors have none
                reason = os.strerror(errno) if errno else str(error)
                sentence = f"{path}: the image cannot be read ({reason})."
                if errno and not isinstance(error, _MISSING):
                    problems.append(JobFailed(sentence))
                else:
                    problems.append(UserError(f"{sentence}{_HINT}"))
        return images, labels, problems


def read_image(path: str, size: int, draw: random.Random | None) -> Image.Image:
    """The image at size × size: a part that is drawn, mirrored or not; without `draw` its middle."""
    with Image.open(path, formats=tuple(FORMATS.values())) as file:
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
