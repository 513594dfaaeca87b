"""A rank of `mpiddp bench loader`: each data source delivers batches, and nothing else runs.

The sources alternate within one job. Their first passes do not count, because these start workers and fill
caches, as a training does once. The speed of the model on such batches is measured first.
"""

from __future__ import annotations

import contextlib
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mpiddp.bench.loader import rank_options
from mpiddp.bench.ranks.training import (
    EXCHANGE_TIMEOUT_S,
    bare_step,
    build_bare,
    hosts_of,
    resolve_training,
)
from mpiddp.bench.result_lines import emit
from mpiddp.bench.rounds import turns
from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.start.join import join
from mpiddp.text import counted, percentile
from mpiddp.train.datasets import Data, default_data_dir, open_data, prefetched
from mpiddp.train.measure import StepTimer
from mpiddp.world import World

MODEL_S = 2.0  # minimum seconds of the model's steps
WIDTH, HEIGHT = 500, 375  # of a generated image: the most common size in ImageNet


@dataclass(frozen=True)
class Opened:
    """A source, its name and its configuration."""

    name: str
    data: Data
    config: Namespace
    device: torch.device


def run(world: World, argv: list[str]) -> None:
    options, training = rank_options(argv)
    with join(world) as coordinator, _generated(coordinator, options.images) as folder:
        opened, missing = _open_all(coordinator, training, folder, options.workers)
        hosts = hosts_of(coordinator)
        shapes = {each.data.shape: each for each in opened}
        model_speeds = {
            shape: _model_images_per_s(coordinator, each) for shape, each in shapes.items()
        }
        speeds: dict[str, list[float]] = {each.name: [] for each in opened}
        for epoch, each in turns(opened, options.rounds, warmup=1):
            speed = _images_per_s(coordinator, each, options.batches, epoch)
            if epoch > 0:
                speeds[each.name].append(speed)
        if coordinator.world.rank == 0:
            found = [
                {
                    "source": each.name,
                    "batch_size": each.config.batch_size,
                    "images_per_s": speeds[each.name],
                    "model_images_per_s": model_speeds[each.data.shape],
                }
                for each in opened
            ]
            arch = opened[0].config.arch
            emit({"arch": arch, "sources": found, "missing": missing, "hosts": hosts})


def _open_all(
    coordinator: Coordinator, training: Sequence[str], generated: Path, workers: Sequence[int]
) -> tuple[list[Opened], dict[str, str]]:
    """Open the available sources, and return the errors of the others. All ranks must call this."""
    config, _, _ = resolve_training(coordinator, training)
    is_named = config.dataset == "image-folder" and config.data_dir is not None
    folder = config.data_dir if is_named else generated
    elsewhere = ["--data-dir", str(default_data_dir())] if is_named else []
    sources = {
        "synthetic 3×32×32": ["--dataset", "cifar10", "--use-syn"],
        "synthetic 3×224×224": ["--dataset", "image-folder", "--use-syn"],
        "CIFAR-10": ["--dataset", "cifar10", *elsewhere],
    }
    for count in workers:
        options = ["--dataset", "image-folder", "--data-dir", str(folder)]
        name = f"image folder, {counted(count, 'worker')}"
        sources[name] = [*options, "--num-workers", str(count)]
    opened, missing = [], {}
    for name, options in sources.items():
        found = _open(coordinator, name, [*training, *options])
        if isinstance(found, Opened):
            opened.append(found)
        else:
            missing[name] = found
    return opened, missing


def _open(coordinator: Coordinator, name: str, training: Sequence[str]) -> Opened | str:
    """Open the source, or return the error of a rank. All ranks must call this."""
    config, _, device = resolve_training(coordinator, training)
    data: Data | None = None
    problem = ""
    try:
        data = open_data(config, coordinator.world, device)
    except (UserError, JobFailed) as error:
        problem = str(error)
    problems = [
        text for text in coordinator.all_gather_json(problem, timeout_s=EXCHANGE_TIMEOUT_S) if text
    ]
    if data is None or problems:
        return problems[0]
    return Opened(name, data, config, device)


def _images_per_s(coordinator: Coordinator, opened: Opened, count: int, epoch: int) -> float:
    """The speed over all ranks while all read; the slowest rank determines it. All ranks must call this."""
    world, size, source = coordinator.world, opened.config.batch_size, opened.data.train
    numbers = torch.arange(world.rank, count * size * world.world_size, world.world_size)
    order = numbers % source.num_images
    batches = prefetched(source.batches(order.split(size), epoch=epoch), opened.device)
    coordinator.all_gather_json("ready", timeout_s=EXCHANGE_TIMEOUT_S)
    timer = StepTimer(opened.device)
    timer.resume()
    for _ in batches:
        timer.tick()
    own = sum(timer.read())
    slowest = max(coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S))
    return float(count * size * world.world_size / slowest)


def _model_images_per_s(coordinator: Coordinator, opened: Opened) -> float:
    """The speed of the model over all ranks on one repeated batch. All ranks must call this.

    The steps have no communication, which gives the highest speed that a source may have to deliver.
    """
    config, device = Namespace(**{**vars(opened.config), "use_syn": True}), opened.device
    synthetic = open_data(config, coordinator.world, device)
    state = build_bare(coordinator, config, synthetic, device)
    images, labels = next(
        synthetic.train.batches([torch.arange(opened.config.batch_size)], epoch=0)
    )
    coordinator.all_gather_json("ready", timeout_s=EXCHANGE_TIMEOUT_S)
    bare_step(state, config, images, labels)
    timer = StepTimer(device)
    timer.resume()
    count = 1  # steps between two readings of the clock; each reading waits for the GPU
    while sum(timer.read()) < MODEL_S:
        for _ in range(count):
            bare_step(state, config, images, labels)
            timer.tick()
        count *= 2
    own = opened.config.batch_size / percentile(timer.read(), 50)
    return float(sum(coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)))


@contextlib.contextmanager
def _generated(coordinator: Coordinator, count: int) -> Iterator[Path]:
    """A temporary folder of `count` JPEGs on each host. All ranks must enter."""
    with contextlib.ExitStack() as stack:
        own = ""
        if coordinator.world.local_rank == 0:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-bench-"))
            _fill(Path(own), count)
        folders = coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)
        on_hosts = zip(coordinator.hostnames, folders, strict=True)
        yield next(Path(f) for host, f in on_hosts if f and host == coordinator.world.hostname)
        # Wait until all ranks have read the folder.
        coordinator.all_gather_json("read", timeout_s=EXCHANGE_TIMEOUT_S)


def _fill(folder: Path, count: int) -> None:
    """Write smooth images with some noise, as large as photographs and as slow to decode."""
    draw = np.random.default_rng(0)
    for split, images in (("train", count), ("val", 2)):
        for number in range(images):
            coarse = draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            noise = draw.integers(-12, 13, (HEIGHT, WIDTH, 3))
            pixels = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
            name = folder / split / f"class{number % 2}" / f"{number}.jpg"
            name.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(name, quality=90)
