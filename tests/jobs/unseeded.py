"""`mpiddp train` whose numbers do not all come from the seed: one rank adds noise from a clock's seed.

    mpirun -np 2 python -m tests.jobs.unseeded WHAT RANK STEP OPTIONS…

From this step on, the noise is in the images, in a buffer (the first running mean), in the loss (the last
layer's output), in a gradient (of conv1.weight), in the rank's shard of this gradient, or in a parameter
(fc.bias). `tests.jobs.turns` can run it too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpiddp import cli
from mpiddp.train import train as trainer
from mpiddp.train.datasets import Batch, Data, Dataset


class Noise:
    """Noise on one rank, from a step on. Each of two runs counts the steps anew."""

    def __init__(self, rank: int, first_step: int) -> None:
        self._rank, self._first_step = rank, first_step
        self._generator = torch.Generator()
        self._generator.seed()
        self.steps = 0  # done

    def add_to(self, tensor: Tensor) -> None:
        if dist.get_rank() == self._rank and self.steps + 1 >= self._first_step:
            # Through `data`, so that autograd does not notice, as it would not notice a faulty kernel.
            tensor.data += 1e-3 * torch.randn(tensor.shape, generator=self._generator)


class NoisyImages:
    """A source whose images have noise, as of an augmentation without a seed."""

    def __init__(self, source: Dataset, noise: Noise) -> None:
        self._source, self._noise = source, noise
        self.num_images = source.num_images

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        for images, labels in self._source.batches(indices, epoch=epoch):
            images = images.clone()
            self._noise.add_to(images)
            yield images, labels


def main(what: str, rank: str, step: str, *options: str) -> None:
    noise = Noise(int(rank), int(step))
    open_data, build_optimizer = trainer.open_data, trainer.build_optimizer

    def open_noisy_data(*arguments: Any) -> Data:
        data = open_data(*arguments)
        return replace(data, train=NoisyImages(data.train, noise)) if what == "images" else data

    def build_and_count(*arguments: Any) -> Any:
        noise.steps = 0
        return build_optimizer(*arguments)

    def after_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if what == "loss" and isinstance(module, nn.Linear):
            noise.add_to(output)
        if what == "buffer" and isinstance(module, nn.BatchNorm2d) and module.num_features == 16:
            noise.add_to(module.running_mean)

    def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        matrices, vectors = (group["params"] for group in optimizer.param_groups)
        if what == "gradient":
            noise.add_to(matrices[0].grad)
        if what == "shard":
            noise.add_to(matrices[0].grad.to_local())
        if what == "parameter":
            noise.add_to(vectors[-1])
        noise.steps += 1

    with ExitStack() as stack:
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        patches.setattr(trainer, "open_data", open_noisy_data)
        patches.setattr(trainer, "build_optimizer", build_and_count)
        stack.callback(register_module_forward_hook(after_forward).remove)
        stack.callback(register_optimizer_step_pre_hook(before_update).remove)
        code = cli.main(["train", *options])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
