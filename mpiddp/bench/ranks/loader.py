"""A rank of `mpiddp bench loader`: each data source delivers batches, and nothing else is done.

The sources take turns within one job. Their first passes are not counted: these start workers and
fill caches, which a training does once.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mpiddp.assembly import assemble
from mpiddp.bench.loader import rank_options
from mpiddp.bench.ranks.training import EXCHANGE_TIMEOUT_S, hosts_of, settled
from mpiddp.bench.words import emit
from mpiddp.crew import Crew
from mpiddp.errors import UserError
from mpiddp.train.data import open_data
from mpiddp.train.data.arrays import default_data_dir
from mpiddp.train.data.prefetch import prefetched
from mpiddp.train.data.source import Source
from mpiddp.train.metrics import StepTimer
from mpiddp.world import World

WIDTH, HEIGHT = 500, 375  # of a generated image: as most of ImageNet's are


@dataclass(frozen=True)
class Opened:
    """A source under its name, with the size of its batches on each rank."""

    name: str
    source: Source
    batch_size: int
    device: torch.device


def run(world: World, argv: list[str]) -> None:
    options, training = rank_options().parse_known_args(argv)
    with assemble(world) as crew, _generated(crew, options.images) as folder:
        opened, missing = _open_all(crew, training, folder, options.workers)
        hosts = hosts_of(crew)
        speeds: list[list[float]] = [[] for _ in opened]
        for epoch in range(options.rounds + 1):
            turns = list(zip(opened, speeds, strict=True))
            for each, seen in turns if epoch % 2 else reversed(turns):
                speed = _images_per_s(crew, each, options.batches, epoch)
                if epoch > 0:
                    seen.append(speed)
        if crew.world.rank == 0:
            found = [
                {"source": each.name, "batch_size": each.batch_size, "images_per_s": seen}
                for each, seen in zip(opened, speeds, strict=True)
            ]
            emit({"sources": found, "missing": missing, "hosts": hosts})


def _open_all(
    crew: Crew, training: Sequence[str], generated: Path, workers: Sequence[int]
) -> tuple[list[Opened], dict[str, str]]:
    """The sources that there are, and why the others are not. All ranks must call this."""
    config, _, _ = settled(crew, training)
    folder = config.data_dir if config.dataset == "image-folder" else str(generated)
    elsewhere = ["--data-dir", str(default_data_dir())] if folder == config.data_dir else []
    sources = {
        "synthetic 3×32×32": ["--dataset", "cifar10", "--use-syn"],
        "synthetic 3×224×224": ["--dataset", "image-folder", "--use-syn"],
        "CIFAR-10": ["--dataset", "cifar10", *elsewhere],
        "Fashion-MNIST": ["--dataset", "fashion-mnist", *elsewhere],
    }
    for count in workers:
        words = ["--dataset", "image-folder", "--data-dir", str(folder)]
        name = f"image folder, {count} worker{'s' * (count != 1)}"
        sources[name] = [*words, "--num-workers", str(count)]
    opened, missing = [], {}
    for name, words in sources.items():
        found = _open(crew, name, [*training, *words])
        if isinstance(found, Opened):
            opened.append(found)
        else:
            missing[name] = found
    return opened, missing


def _open(crew: Crew, name: str, training: Sequence[str]) -> Opened | str:
    """The source, or why a rank does not have it. All ranks must call this."""
    config, _, device = settled(crew, training)
    assert config.batch_size is not None
    source: Source | None = None
    problem = ""
    try:
        source = open_data(config, crew.world, device).train
    except UserError as error:
        problem = str(error)
    problems = [text for text in crew.exchange(problem, timeout_s=EXCHANGE_TIMEOUT_S) if text]
    if source is None or problems:
        return problems[0]
    return Opened(name, source, config.batch_size, device)


def _images_per_s(crew: Crew, opened: Opened, count: int, epoch: int) -> float:
    """Over all ranks, which read at the same time; the slowest counts. All ranks must call this."""
    world, size = crew.world, opened.batch_size
    numbers = torch.arange(world.rank, count * size * world.world_size, world.world_size)
    order = numbers % opened.source.num_images
    batches = prefetched(opened.source.batches(order.split(size), epoch=epoch), opened.device)
    crew.exchange("ready", timeout_s=EXCHANGE_TIMEOUT_S)
    timer = StepTimer(opened.device)
    timer.resume()
    for _ in batches:
        timer.tick()
    own = f"{sum(timer.read())}"
    slowest = max(map(float, crew.exchange(own, timeout_s=EXCHANGE_TIMEOUT_S)))
    return count * size * world.world_size / slowest


@contextlib.contextmanager
def _generated(crew: Crew, count: int) -> Iterator[Path]:
    """A folder of that many JPEGs on this host, for as long as this lasts. All ranks must enter."""
    with contextlib.ExitStack() as stack:
        own = ""
        if crew.world.local_rank == 0:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-bench-"))
            _fill(Path(own), count)
        folders = crew.exchange(own, timeout_s=EXCHANGE_TIMEOUT_S)
        on_hosts = zip(crew.hostnames, folders, strict=True)
        yield next(Path(f) for host, f in on_hosts if f and host == crew.world.hostname)
        crew.exchange("read", timeout_s=EXCHANGE_TIMEOUT_S)  # by all, before it goes


def _fill(folder: Path, count: int) -> None:
    """Smooth images with some noise: as large as photographs, and as slow to decode."""
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
