"""A rank of `python -m benchmarks.accuracy`: `accuracy.py SETTINGS FOLDER IMAGES`. It trains and scores."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp
from benchmarks.accuracy import HELD_OUT
from mpiddp.bench.measured_jobs import Result, emit
from mpiddp.train.data import DATASETS, Cifar, Data, DeviceImages
from mpiddp.train.main import Trainer, gathered, open_checkpoints, parse, resolve
from mpiddp.train.train import Recipe


def images_for(recipe: Recipe, folder: Path, device: torch.device, *, for_testing: bool) -> Data:
    """CIFAR-10. The last images for training take the place of those for testing, unless `for_testing`."""
    source = DATASETS[recipe.dataset]
    assert isinstance(source, Cifar)
    (images, labels), test = source.read(folder)
    if not for_testing:
        test = images[-HELD_OUT:], labels[-HELD_OUT:]
        images, labels = images[:-HELD_OUT], labels[:-HELD_OUT]
    pixels = partial(DeviceImages, device=device, mean=source.mean, std=source.std)
    augmented = partial(pixels, max_shift=recipe.max_shift, flips=recipe.flips)
    train = augmented(images.copy(), labels, seed=recipe.seed)
    name = source.name if for_testing else f"{source.name} with {HELD_OUT} held out"
    return Data(name, source.num_classes, recipe.image_size, train, pixels(test[0].copy(), test[1]))


def main() -> None:
    settings, folder, images = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    with mpiddp.process_group(backend="gloo") as world:
        device = torch.device(str(world.device))
        defaults = resolve(parse([]), world.world_size, device)
        settings = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
        config = replace(defaults, **settings)
        config = replace(config, global_batch_size=config.batch_size * world.world_size)
        data = images_for(config, folder, device, for_testing=images == "test")
        training = Trainer(config, data, world, Path(gathered(tempfile.mkdtemp())[0]))
        began, cpu_began = time.monotonic(), time.process_time()
        with open_checkpoints(training) as checkpoints:
            training.run(checkpoints)
        cpu_s = torch.tensor([time.process_time() - cpu_began])
        dist.all_reduce(cpu_s)
        result: Result = {"wall_s": time.monotonic() - began, "cpu_s": cpu_s.item()}
        assert data.test is not None
        for views in (2, 6):
            score = training.evaluate(data.test, views=views)
            result |= {"1": score.accuracy, str(views): score.accuracy_of_views}
    if world.rank == 0:
        emit(result)


if __name__ == "__main__":
    main()
