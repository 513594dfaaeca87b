"""A rank of `mpiddp bench loader`: a data source delivers batches, and nothing else runs.

The numbers of workers alternate within one job. Their first passes do not count, because these start
workers and fill caches, as a training does once. The speed of the model is measured first.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from mpiddp.bench.figures import Result, percentile, turns
from mpiddp.bench.loader import Options
from mpiddp.bench.ranks.training import (
    EXCHANGE_TIMEOUT_S,
    Job,
    bare_step,
    build_bare,
    open_source,
    started,
)
from mpiddp.text import counted
from mpiddp.train.data import Data, prefetched
from mpiddp.train.measure import StepTimer, slowest
from mpiddp.world import World

MODEL_S = 2.0  # minimum seconds of the model's steps
WIDTH, HEIGHT = 500, 375  # of a generated image: the most common size in ImageNet


def rank(world: World, options: Options, training: list[str]) -> Result:
    sources = ("--dataset", "--data-dir", "--use-syn")
    is_named = any(each.replace("_", "-").startswith(sources) for each in training)
    source = [] if is_named else ["--dataset=image-folder"]
    with started(world, [*training, *source]) as job, contextlib.ExitStack() as stack:
        if not is_named:
            generated = stack.enter_context(_generated(job, options.images))
            job = replace(job, config=replace(job.config, data_dir=str(generated)))
        config = job.config
        if config.dataset == "image-folder" and not config.use_syn:
            opened = {
                f"image folder, {counted(count, 'worker')}": open_source(job, num_workers=count)
                for count in options.workers
            }
        else:
            opened = {config.dataset: open_source(job)}
        model = _model_images_per_s(job)
        speeds: dict[str, list[float]] = {name: [] for name in opened}
        for epoch, name in turns(list(opened), options.rounds, warmup=1):
            speed = _images_per_s(job, opened[name], options.batches, epoch)
            if epoch > 0:
                speeds[name].append(speed)
    return {
        "arch": config.arch,
        "shape": (3, config.image_size, config.image_size),
        "batch_size": config.batch_size,
        "model_images_per_s": model,
        "sources": [{"source": name, "images_per_s": each} for name, each in speeds.items()],
        "hosts": job.hosts,
    }


def _images_per_s(job: Job, data: Data, count: int, epoch: int) -> float:
    """The speed over all ranks while all read; the slowest rank determines it. All ranks must call this."""
    world, size, source = job.coordinator.world, job.config.batch_size, data.train
    numbers = torch.arange(world.rank, count * size * world.world_size, world.world_size)
    order = (numbers % source.num_images).split(size)
    batches = prefetched(source.batches(order, epoch=epoch), job.device)
    dist.barrier()
    timer = StepTimer(job.device)
    timer.resume()
    for _ in batches:
        timer.tick()
    (longest_s,) = slowest([sum(timer.read())], job.device)
    return float(count * size * world.world_size / longest_s)


def _model_images_per_s(job: Job) -> float:
    """The speed of the model over all ranks on one repeated batch. All ranks must call this.

    The steps have no communication, which gives the highest speed that a source may have to deliver.
    """
    config, data = job.config, open_source(job, use_syn=True)
    state = build_bare(job, data)
    images, labels = next(data.train.batches([torch.arange(config.batch_size)], epoch=0))
    dist.barrier()
    bare_step(state, config, images, labels)
    timer = StepTimer(job.device)
    timer.resume()
    count = 1  # steps between two readings of the clock; each reading waits for the GPU
    while sum(timer.read()) < MODEL_S:
        for _ in range(count):
            bare_step(state, config, images, labels)
            timer.tick()
        count *= 2
    own = config.batch_size / percentile(timer.read(), 50)
    return float(sum(job.coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)))


@contextlib.contextmanager
def _generated(job: Job, count: int) -> Iterator[Path]:
    """A temporary folder of `count` JPEGs on each host. All ranks must enter."""
    hosts, world = job.coordinator.hostnames, job.coordinator.world
    with contextlib.ExitStack() as stack:
        own = ""
        if world.local_rank == 0:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-bench-"))
            _fill(Path(own), count)
        folders = job.coordinator.all_gather_json(own, timeout_s=EXCHANGE_TIMEOUT_S)
        on_hosts = zip(hosts, folders, strict=True)
        yield next(Path(f) for host, f in on_hosts if f and host == world.hostname)
        dist.barrier()  # until all ranks have read the folder


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
