"""`mpiddp bench loader`: images/s of a data source, beside those of a training that waits for no data.

    mpiddp bench loader -H localhost:2 --dataset image-folder --data-dir /data/imagenet --workers 2,4

The source is the one that the options of `mpiddp train` name. A folder of images is read with each number of
workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, option, shown, turns, wholes
from mpiddp.text import counted

if TYPE_CHECKING:
    from mpiddp.train.data import Dataset

MODEL_STEPS = 8  # of the training; its first ones do not count


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...] = option(
        "numbers of workers for a folder of images", type=wholes(0), default="0,2,4"
    )
    batches: int = option("batches per pass and rank", type=whole(2), default=32)
    rounds: int = option("rounds of all numbers of workers", type=whole(1), default=3)


class Results(TypedDict):
    """Speeds over all ranks, in images/s: of the training, and of each source in each round."""

    ranks: int
    arch: str
    batch_size: int
    model_images_per_s: float
    images_per_s: dict[str, list[float]]
    hosts: list[Result]


def table(results: Results) -> str:
    arch, model = results["arch"], results["model_images_per_s"]
    rows = [
        [source, shown(speeds, ",.0f"), f"{model:,.0f}", f"{median(speeds) / model:.1f}"]
        for source, speeds in results["images_per_s"].items()
    ]
    head = ("source", "images/s over all ranks", f"{arch} images/s", "loader / model")
    title = (
        f"{counted(results['ranks'], 'rank')}, batches of {results['batch_size']}. Below 1 the model "
        "waits for the source"
    )
    return f"{title}\n\n{aligned(head, rows)}"


# --- a rank ---


def rank(options: Options, training: list[str]) -> Result:
    """Read batches on this rank, while nothing else runs; the numbers of workers alternate.

    Their first passes do not count, because these start workers and fill caches, as a training does once.
    """
    import mpiddp
    from mpiddp.bench.training import synthetic_job, time_runner
    from mpiddp.train.data import open_data, prepare
    from mpiddp.train.run import PREPARE_TIMEOUT_S

    with synthetic_job(training, MODEL_STEPS) as job:
        config, world = replace(job.config, use_syn=False), job.world
        with mpiddp.together(timeout_s=PREPARE_TIMEOUT_S):
            if world.local_rank == 0:
                prepare(config)
        opened = {}
        with mpiddp.together():
            is_folder = config.dataset == "image-folder"
            for count in options.workers if is_folder else (0,):
                data = open_data(replace(config, num_workers=count), job.device)
                workers = f", {counted(count, 'worker')}" if is_folder else ""
                opened[data.name + workers] = data.train
        model = time_runner(job)["images_per_s"]
        speeds: dict[str, list[float]] = {name: [] for name in opened}
        for epoch, name in turns(list(opened), options.rounds, warmup=1):
            speed = _images_per_s(opened[name], options.batches, config.batch_size, epoch)
            if epoch > 0:
                speeds[name].append(speed)
    return {
        "ranks": world.world_size,
        "arch": config.arch,
        "batch_size": config.batch_size,
        "model_images_per_s": model,
        "images_per_s": speeds,
    }


def _images_per_s(source: Dataset, count: int, size: int, epoch: int) -> float:
    """The speed over all ranks while all read; the slowest rank determines it. A collective."""
    import torch
    import torch.distributed as dist

    from mpiddp.train.data import prefetched
    from mpiddp.train.measure import StepTimer, slowest

    ranks = dist.get_world_size()
    numbers = torch.arange(dist.get_rank(), count * size * ranks, ranks)
    order = (numbers % source.num_images).split(size)
    batches = prefetched(source.batches(order, epoch=epoch), source.device)
    dist.barrier()
    timer = StepTimer(source.device)
    timer.resume()
    for _ in batches:
        timer.tick()
    (longest_s,) = slowest([sum(timer.read())], source.device)
    return float(count * size * ranks / longest_s)
