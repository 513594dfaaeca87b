"""A rank of `mpiddp bench loader`: a data source delivers batches, and nothing else runs.

The numbers of workers alternate within one job. Their first passes do not count, because these start
workers and fill caches, as a training does once. The speed of the model is measured first.
"""

from __future__ import annotations

import contextlib
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mpiddp.bench.figures import emit, turns
from mpiddp.bench.loader import Options
from mpiddp.bench.ranks.training import (
    EXCHANGE_TIMEOUT_S,
    bare_step,
    build_bare,
    hosts_of,
    resolve_training,
)
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.join import join
from mpiddp.text import counted, percentile
from mpiddp.train.datasets import Data, open_data, prefetched
from mpiddp.train.measure import StepTimer
from mpiddp.world import World

MODEL_S = 2.0  # minimum seconds of the model's steps
WIDTH, HEIGHT = 500, 375  # of a generated image: the most common size in ImageNet


def rank(world: World, options: Options, training: list[str]) -> None:
    is_named = any(each.startswith(("--dataset", "--data-dir", "--use-syn")) for each in training)
    with join(world) as coordinator, contextlib.ExitStack() as stack:
        if not is_named:
            folder = stack.enter_context(_generated(coordinator, options.images))
            training = [*training, "--dataset", "image-folder", "--data-dir", str(folder)]
        config, _, device = resolve_training(coordinator, training)
        opened = _open(coordinator, config, device, options.workers)
        shape = next(iter(opened.values())).shape
        hosts, model = hosts_of(coordinator), _model_images_per_s(coordinator, config, device)
        speeds: dict[str, list[float]] = {name: [] for name in opened}
        for epoch, name in turns(list(opened), options.rounds, warmup=1):
            speed = _images_per_s(coordinator, config, opened[name], device, options.batches, epoch)
            if epoch > 0:
                speeds[name].append(speed)
        if coordinator.world.rank == 0:
            sources = [{"source": name, "images_per_s": each} for name, each in speeds.items()]
            emit(
                {
                    "arch": config.arch,
                    "shape": shape,
                    "batch_size": config.batch_size,
                    "model_images_per_s": model,
                    "sources": sources,
                    "hosts": hosts,
                }
            )


def _open(
    coordinator: Coordinator, config: Namespace, device: torch.device, workers: tuple[int, ...]
) -> dict[str, Data]:
    """The source, for each number of workers if it has any. All ranks must call this."""
    configs = {config.dataset: config}
    if config.dataset == "image-folder" and not config.use_syn:
        configs = {
            f"image folder, {counted(count, 'worker')}": _changed(config, num_workers=count)
            for count in workers
        }
    with coordinator.all_or_none():
        world = coordinator.world
        return {name: open_data(each, world, device) for name, each in configs.items()}


def _changed(config: Namespace, **values: object) -> Namespace:
    return Namespace(**{**vars(config), **values})


def _images_per_s(
    coordinator: Coordinator,
    config: Namespace,
    data: Data,
    device: torch.device,
    count: int,
    epoch: int,
) -> float:
    """The speed over all ranks while all read; the slowest rank determines it. All ranks must call this."""
    world, size, source = coordinator.world, config.batch_size, data.train
    numbers = torch.arange(world.rank, count * size * world.world_size, world.world_size)
    order = (numbers % source.num_images).split(size)
    batches = prefetched(source.batches(order, epoch=epoch), device)
    coordinator.all_gather_json("ready", timeout_s=EXCHANGE_TIMEOUT_S)
    timer = StepTimer(device)
    timer.resume()
    for _ in batches:
        timer.tick()
    own = sum(timer.read())
    slowest = max(coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S))
    return float(count * size * world.world_size / slowest)


def _model_images_per_s(coordinator: Coordinator, config: Namespace, device: torch.device) -> float:
    """The speed of the model over all ranks on one repeated batch. All ranks must call this.

    The steps have no communication, which gives the highest speed that a source may have to deliver.
    """
    config = _changed(config, use_syn=True)
    synthetic = open_data(config, coordinator.world, device)
    state = build_bare(coordinator, config, synthetic, device)
    images, labels = next(synthetic.train.batches([torch.arange(config.batch_size)], epoch=0))
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
    own = config.batch_size / percentile(timer.read(), 50)
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
