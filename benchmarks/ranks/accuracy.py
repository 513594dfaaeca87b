"""A rank of `python -m benchmarks.accuracy`: `accuracy.py SETTINGS FOLDER IMAGES`. It trains and scores.

It has what recipes have been tried with: `Ideas`. What is proven moves into mpiddp/train/train.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpiddp
from benchmarks.accuracy import HELD_OUT
from mpiddp.bench.measured_jobs import Result, emit
from mpiddp.train.config import Config, parse, resolve
from mpiddp.train.data import DATASETS, Cifar, Data, DeviceImages
from mpiddp.train.main import open_checkpoints
from mpiddp.train.parallel import gathered
from mpiddp.train.trainer import Trainer

AVERAGE_EVERY = 8  # steps between two models of the average


@dataclass(frozen=True)
class Ideas(Config):
    """A recipe, and ideas that may improve it. The defaults leave each of them out."""

    alternates: bool = False  # mirror each image in every second epoch (Jordan 2024)
    dirac: bool = False  # begin with 3×3 filters that pass on their input, as airbench
    head_lr: float = 1.0  # of the last layer's matrix, relative to the rate of muon
    bias_lr: float = 1.0  # of biases and BatchNorm, relative to the rate
    final_lr: float = 0.0  # rate at the end, relative to the peak
    average_epochs: float = 0.0  # score the mean of the weights of so many last epochs


class Alternating(DeviceImages):
    """Images of which the first epoch mirrors some by a draw, and each later epoch the others."""

    def _draws(self, epoch: int) -> Tensor:
        draws = super()._draws(epoch)
        draws[:, 2] = (super()._draws(0)[:, 2] + epoch) % 2
        return draws


class Trial(Trainer):
    """A training with ideas. The optimizer is Muon."""

    config: Ideas

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for module in model.modules() if self.config.dirac else ():
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                nn.init.dirac_(module.weight.data[: module.in_channels])
        return model

    def update(self, step: int) -> None:
        _, head, biases = self.optimizer.param_groups
        head["lr"] *= self.config.head_lr
        biases["lr"] *= self.config.bias_lr
        super().update(step)

    def schedule(self, progress: float) -> float:
        return 1 - (1 - self.config.final_lr) * progress

    def average_weight(self, step: int) -> float:
        first = self.num_steps - round(self.config.average_epochs * self.length)
        models, rest = divmod(step - first, AVERAGE_EVERY)
        return 1 / models if models > 0 and rest == 0 else 0.0


def trial(config: Config, **settings: Any) -> Ideas:
    """The recipe with these settings; lists become tuples."""
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()
    }
    return replace(Ideas(**vars(config)), **values)


def images_for(ideas: Ideas, folder: Path, device: torch.device, *, for_testing: bool) -> Data:
    """CIFAR-10. The last images for training take the place of those for testing, unless `for_testing`."""
    source = DATASETS[ideas.dataset]
    assert isinstance(source, Cifar)
    (images, labels), test = source.read(folder)
    if not for_testing:
        test = images[-HELD_OUT:], labels[-HELD_OUT:]
        images, labels = images[:-HELD_OUT], labels[:-HELD_OUT]
    kind = Alternating if ideas.alternates else DeviceImages
    how: dict[str, Any] = {"device": device, "mean": source.mean, "std": source.std}
    train = kind(images.copy(), labels, seed=ideas.seed, max_shift=ideas.max_shift, **how)
    name = source.name if for_testing else f"{source.name} with {HELD_OUT} held out"
    shown = DeviceImages(test[0].copy(), test[1], **how)
    return Data(name, source.num_classes, ideas.image_size, train, shown)


def main() -> None:
    settings, folder, images = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    with mpiddp.process_group(backend="gloo") as world:
        device = torch.device(str(world.device))
        ideas = trial(resolve(parse([]), world.world_size, device), **settings)
        ideas = replace(ideas, global_batch_size=ideas.batch_size * world.world_size)
        data = images_for(ideas, folder, device, for_testing=images == "test")
        training = Trial(ideas, data, world, Path(gathered(tempfile.mkdtemp())[0]))
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
