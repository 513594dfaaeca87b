"""`mpiddp bench loader`: images/s of a data source, beside the speed of the model.

The source is the one that the options of `mpiddp train` name, else a generated folder of JPEGs. A folder of
images is read with each number of workers.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import (
    PATIENCE_S,
    Result,
    Spread,
    aligned,
    percentile,
    shown,
    spread,
    turns,
)
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import option, wholes
from mpiddp.text import counted

if TYPE_CHECKING:
    from mpiddp.bench.training import Job
    from mpiddp.train.data import Data
    from mpiddp.world import World

MODEL_S = 2.0  # minimum seconds of the model's steps
WIDTH, HEIGHT = 500, 375  # of a generated image: the most common size in ImageNet
_MOST_TIMES = 10.0  # the model never waits for a source that is so much faster


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...] = option(
        "numbers of workers for a folder of images", type=wholes(0), default="0,2,4"
    )
    images: int = option("images in the generated folder", type=whole(4), default=512)
    batches: int = option("batches per pass and rank", type=whole(2), default=32)
    rounds: int = option("rounds of all numbers of workers", type=whole(1), default=3)


class Source(TypedDict):
    source: str
    images_per_s: Spread
    times_model: float  # the speed relative to that of the model


class Results(TypedDict):
    ranks: int
    arch: str
    shape: tuple[int, int, int]  # of an image
    batch_size: int
    model_images_per_s: float
    sources: list[Source]
    hosts: list[Result]


def measure(options: Options, jobs: Jobs) -> Results:
    note(f"loader: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')} per source")
    found: Results = jobs.run("loader", options, ranks=jobs.slots)
    return found


def table(results: Results) -> str:
    arch, model = results["arch"], results["model_images_per_s"]
    rows = []
    for source in results["sources"]:
        times = source["times_model"]
        ratio = f"{times:.1f}" if times <= _MOST_TIMES else f">{_MOST_TIMES:.0f}"
        rows.append(
            [source["source"], shown(source["images_per_s"], ",.0f"), f"{model:,.0f}", ratio]
        )
    head = ("source", "images/s over all ranks", f"{arch} images/s", "loader / model")
    title = (
        f"{counted(results['ranks'], 'rank')}, batches of {results['batch_size']}. Below 1 the model "
        "waits for the source"
    )
    return f"{title}\n\n{aligned(head, rows)}"


# --- a rank ---


def rank(world: World, options: Options, training: list[str]) -> Results:
    """Read batches on this rank, while nothing else runs; the numbers of workers alternate.

    Their first passes do not count, because these start workers and fill caches, as a training does once.
    """
    from mpiddp.bench.training import open_source, started

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
    spreads = {name: spread(each) for name, each in speeds.items()}
    return {
        "ranks": world.world_size,
        "arch": config.arch,
        "shape": (3, config.image_size, config.image_size),
        "batch_size": config.batch_size,
        "model_images_per_s": model,
        "sources": [
            {"source": name, "images_per_s": each, "times_model": each["median"] / model}
            for name, each in spreads.items()
        ],
        "hosts": job.hosts,
    }


def _images_per_s(job: Job, data: Data, count: int, epoch: int) -> float:
    """The speed over all ranks while all read; the slowest rank determines it. All ranks must call this."""
    import torch
    import torch.distributed as dist

    from mpiddp.train.data import prefetched
    from mpiddp.train.measure import StepTimer, slowest

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
    import torch
    import torch.distributed as dist

    from mpiddp.bench.training import bare_step, build_bare, open_source
    from mpiddp.train.measure import StepTimer

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
    return float(sum(job.coordinator.all_gather_json(own, timeout_s=PATIENCE_S)))


@contextlib.contextmanager
def _generated(job: Job, count: int) -> Iterator[Path]:
    """A temporary folder of `count` JPEGs on each host. All ranks must enter."""
    import torch.distributed as dist

    hosts, world = job.coordinator.hostnames, job.coordinator.world
    with contextlib.ExitStack() as stack:
        own = ""
        if world.local_rank == 0:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-bench-"))
            _fill(Path(own), count)
        folders = job.coordinator.all_gather_json(own, timeout_s=PATIENCE_S)
        on_hosts = zip(hosts, folders, strict=True)
        yield next(Path(f) for host, f in on_hosts if f and host == world.hostname)
        dist.barrier()  # until all ranks have read the folder


def _fill(folder: Path, count: int) -> None:
    """Write smooth images with some noise, as large as photographs and as slow to decode."""
    import numpy as np
    from PIL import Image

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
