"""A folder of images in ImageNet's layout: train/CLASS/*.jpg and val/CLASS/*.jpg.

DataLoader workers decode and crop; the device normalizes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.job.stop import end_children_at_exit, obey_only
from mpiddp.text import escaped, shown
from mpiddp.train.data.dataset import Batch
from mpiddp.train.data.datasets import DATASETS
from mpiddp.train.data.decode import FORMATS, PREFETCH, Decoded, Decoder, Key

MEAN, STD = DATASETS["image-folder"].mean, DATASETS["image-folder"].std


class ImageFolder:
    """One split of the folder as a `Dataset`."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        image_size: int,
        augment: bool,
        seed: int = 0,
        num_workers: int = 4,
        keep_workers: bool = True,
        start_method: str | None = None,
        channels_last: bool = True,
    ) -> None:
        """
        Args:
            keep_workers: keep the workers from one call of `batches` to the next.
            start_method: of workers, "fork", "forkserver" or "spawn"; the default depends on the device.
        """
        self.folder = folder
        self.classes = class_names(folder)
        self.samples = tuple(  # paths as strings, which are smaller to pickle for unforked workers
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            # macOS leaves a hidden file beside each one in an archive.
            if path.suffix.lower() in FORMATS and not path.name.startswith(".")
        )
        filled = {label for _, label in self.samples}
        if empty := [name for label, name in enumerate(self.classes) if label not in filled]:
            raise UserError(
                f"{folder}: the folder {shown(empty[0])} contains no images ({', '.join(sorted(FORMATS))}). "
                "Each folder there is a class."
            )
        self.num_images = len(self.samples)
        self.device = device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        std = torch.tensor(STD, device=device).view(3, 1, 1)
        self._scale = 1 / (255 * std)
        self._shift = -torch.tensor(MEAN, device=device).view(3, 1, 1) / std
        self._decoder = Decoder(self.samples, image_size, augment=augment, seed=seed)
        self._num_workers = num_workers
        self._keeps_workers = keep_workers and num_workers > 0
        # With a GPU the workers are not forked, because threads of CUDA and NCCL may hold a lock.
        on_cpu = device.type == "cpu"
        self._start_method = start_method or ("fork" if on_cpu else "forkserver")
        self._order = _Batches()
        self._loader: DataLoader[Decoded] | None = None

    def names(self) -> Iterator[str]:
        """Each image's class and file, in the order of their numbers."""
        for path, label in self.samples:
            yield f"{self.classes[label]}/{path.rpartition(os.sep)[2]}"

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        if not indices:
            return
        self._order.batches = [[(number, epoch) for number in batch.tolist()] for batch in indices]
        loader = self._loader or self._start()
        self._loader = loader if self._keeps_workers else None
        for images, labels in self._decoded(loader):
            images = images.to(self.device, non_blocking=True)
            images = images * self._scale + self._shift
            yield (
                images.contiguous(memory_format=self.memory_format),
                labels.to(self.device, non_blocking=True),
            )

    def _start(self) -> DataLoader[Decoded]:
        has_workers = self._num_workers > 0
        if has_workers:
            end_children_at_exit()
        if self._start_method == "forkserver":  # otherwise every worker would import torch itself
            multiprocessing.set_forkserver_preload(["mpiddp.train.data.worker_server"])
        return DataLoader(
            self._decoder,
            batch_sampler=self._order,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            prefetch_factor=PREFETCH if has_workers else None,
            persistent_workers=self._keeps_workers,
            multiprocessing_context=self._start_method if has_workers else None,
            worker_init_fn=partial(_leave_stops_to, os.getpid()),
            pin_memory=self.device.type != "cpu",
            generator=torch.Generator(),  # the workers' seeds must not come from the rank's RNG
        )

    def _decoded(self, loader: DataLoader[Decoded]) -> Iterator[Batch]:
        """The images and labels of the loader's batches.

        Raises:
            UserError: an image is broken.
            JobFailed: a disk has failed.
        """
        for images, labels, broken in loader:
            if broken is not None:
                path, reason, is_failure = broken
                if is_failure:
                    raise JobFailed(escaped(f"{path} cannot be read ({reason})."))
                raise UserError(
                    escaped(f"{path}: Pillow cannot read this image ({reason}). ")
                    + "Replace or remove it."
                )
            yield images, labels


class _Batches:
    """The batches of an epoch, for a loader that is kept for several epochs."""

    def __init__(self) -> None:
        self.batches: list[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _leave_stops_to(rank: int, worker: int) -> None:
    """Initialize a worker: it leaves a stop to its rank, whose pid this is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    obey_only(rank)


def _as_it_is(batch: Any) -> Any:
    """Collate nothing, because the decoder delivers whole batches."""
    return batch


def class_names(folder: Path) -> tuple[str, ...]:
    """The classes of the folder: its subfolders in sorted order, numbered as in torchvision, but hidden ones.

    Raises:
        UserError: the folder does not exist or has no subfolders.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is missing. Expected ImageNet's layout: train/CLASS/*.jpg, val/CLASS/*.jpg."
        )
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    names = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    if not names:
        raise UserError(f"{folder} contains no folders. Expected one folder of images per class.")
    return names
