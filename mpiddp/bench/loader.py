"""`mpiddp bench loader`: images/s of a data source, beside the speed of the model.

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
    import torch

    from mpiddp.train.config import Config
    from mpiddp.train.data import Dataset

MODEL_S = 2.0  # minimum seconds of the model's steps


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...] = option(
        "numbers of workers for a folder of images", type=wholes(0), default="0,2,4"
    )
    batches: int = option("batches per pass and rank", type=whole(2), default=32)
    rounds: int = option("rounds of all numbers of workers", type=whole(1), default=3)


class Results(TypedDict):
    """Speeds over all ranks, in images/s: of the model, and of each source in each round."""

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
    import torch

    import mpiddp
    from mpiddp.bench.training import started
    from mpiddp.train.data import open_data

    with started(training) as (world, config):
        device = torch.device(str(world.device))
        model = _model_images_per_s(config, device)
        is_folder = config.dataset == "image-folder" and not config.use_syn
        opened = {}
        with mpiddp.together():
            for count in options.workers if is_folder else (config.num_workers,):
                data = open_data(replace(config, num_workers=count), device)
                opened[f"{data.name}, {counted(count, 'worker')}"] = data.train
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


def _model_images_per_s(config: Config, device: torch.device) -> float:
    """The speed of the model over all ranks on one repeated batch. A collective.

    The steps have no communication, which gives the highest speed that a source may have to deliver.
    """
    import torch
    import torch.distributed as dist

    from mpiddp.bench.training import bare_step
    from mpiddp.train.data import open_data
    from mpiddp.train.measure import StepTimer, gathered
    from mpiddp.train.state import State, build_model, build_optimizer

    data, timer = open_data(replace(config, use_syn=True), device), StepTimer(device)
    model = build_model(config, data, device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
    state = State(model, model, model, build_optimizer(model, config), scaler, timer)
    images, labels = next(data.train.batches([torch.arange(config.batch_size)], epoch=0))
    dist.barrier()
    bare_step(state, config, images, labels)
    timer.resume()
    count = 1  # steps between two readings of the clock; each reading waits for the GPU
    while sum(timer.read()) < MODEL_S:
        for _ in range(count):
            bare_step(state, config, images, labels)
            timer.tick()
        count *= 2
    return float(sum(gathered(config.batch_size / median(timer.read()))))
