"""Compare the gradients of steps and an evaluation on N ranks with those of a single process.

    mpirun -np 3 python -m tests.jobs.exactness OUT.json

`tests.jobs.turns` can run it too. The reference is plain torch over all images at once, which every rank
computes itself.
"""

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mpiddp.checkpoints.contents import restore_rng_states, rng_states
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import default_group
from mpiddp.train.config import TrainConfig
from mpiddp.train.data.dataset import Batch
from mpiddp.train.engine import backward
from mpiddp.train.evaluate import evaluate
from mpiddp.train.order import Order, Step
from mpiddp.train.parallel import wrap
from mpiddp.train.resnet import ARCHS
from tests.support.training import configured

generator = torch.Generator().manual_seed(3)
CPU = torch.device("cpu")
IMAGES = torch.randn(64, 3, 8, 8, generator=generator)
LABELS = torch.randint(10, (64,), generator=generator)


class Recorded:
    """A source of the images above that records the requested ones."""

    def __init__(self, num_images: int) -> None:
        self.num_images = num_images
        self.requested: list[int] = []

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        for numbers in indices:
            self.requested += numbers.tolist()
            yield IMAGES[numbers], LABELS[numbers]


def all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def without_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def largest_errors(
    config: TrainConfig, accum: int, num_images: int, global_batch: int
) -> tuple[float, float]:
    """The largest relative error of a gradient, and the largest error of the loss, over one epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = Order(
        num_samples=num_images,
        global_batch_size=global_batch,
        grad_accum_steps=accum,
        rank=rank,
        world_size=world_size,
        seed=4,
        keep_tail=True,
    )
    model = without_batch_norm()
    reference = copy.deepcopy(model)
    ddp = wrap(model, config, (3, 8, 8))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    permutation, done = order.permutation(epoch=0), 0
    gradient_error = loss_error = 0.0
    for step in order.steps(epoch=0):
        batches = Recorded(64).batches(step.micro_batches, epoch=0)
        loss_sum = backward(ddp, batches, step, scaler, config)
        dist.all_reduce(loss_sum)

        everything = permutation[done : done + step.num_images]
        done += step.num_images
        loss = F.cross_entropy(
            reference(IMAGES[everything]),
            LABELS[everything],
            label_smoothing=config.label_smoothing,
        )
        loss.backward()
        loss_error = max(loss_error, abs(loss_sum.item() / step.num_images - loss.item()))
        for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            assert right.grad is not None
            error = (ours.grad - right.grad).abs().max() / right.grad.abs().max()
            gradient_error = max(gradient_error, error.item())
        model.zero_grad()
        reference.zero_grad()
    assert done == num_images
    return max(all_gather(gradient_error)), max(all_gather(loss_error))


def reductions_of_a_step(config: TrainConfig) -> int:
    """The number of gradient reductions in a step of three backward passes."""
    ddp = wrap(without_batch_norm(), config, (3, 8, 8))
    assert isinstance(ddp, DistributedDataParallel)
    reduced: list[int] = []  # the model fits into one bucket

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        reduced.append(bucket.index())
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(dist.group.WORLD, hook)
    micro_batches = tuple(torch.arange(6).split(2))
    step = Step(micro_batches, 6 * dist.get_world_size(), ddp_averages=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    backward(ddp, Recorded(6).batches(micro_batches, epoch=0), step, scaler, config)
    return len(reduced)


def score(config: TrainConfig, num_images: int) -> dict[str, Any]:
    """The result of the evaluation, the reference, and the images that the ranks requested."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = ARCHS["resnet20"]()
    reference = copy.deepcopy(model)
    # Like after training, the ranks have different statistics. Their mean is the reference's.
    model.get_buffer("bn1.running_mean").add_(rank - (world_size - 1) / 2)
    before = copy.deepcopy(model.state_dict())

    source = Recorded(num_images)
    ours = evaluate(model, source, config, CPU, batch_size=5)

    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.training
    with torch.no_grad():
        logits = reference.eval()(IMAGES[:num_images])
    return {
        "right": round(ours.accuracy * num_images, 6),
        "num_images": ours.num_images,
        "loss": ours.loss,
        "reference_right": int((logits.argmax(1) == LABELS[:num_images]).sum()),
        "reference_loss": F.cross_entropy(logits, LABELS[:num_images]).item(),
        "requested": sorted(number for part in all_gather(source.requested) for number in part),
    }


def draws_after_restoring() -> bool:
    """Whether every rank draws the same numbers after its state is restored."""
    torch.manual_seed(dist.get_rank())
    state = rng_states(dist.get_rank())
    expected = torch.rand(3)
    torch.manual_seed(99)
    restore_rng_states(state, dist.get_rank())
    return all(all_gather(torch.equal(torch.rand(3), expected)))


def main(file: str) -> None:
    config = configured("--amp=off")
    smoothed = replace(config, label_smoothing=0.1)
    with join() as coordinator, default_group(coordinator, "gloo", CPU, timeout_s=60):
        results = {
            "errors": {
                f"{kind.label_smoothing} {accum} {num_images} {batch}": largest_errors(
                    kind, accum, num_images, batch
                )
                for kind, accum, num_images, batch in (
                    (config, 1, 48, 24),
                    (config, 2, 48, 24),
                    (smoothed, 2, 48, 24),
                    *((config, a, 24 + tail, 24) for a in (1, 2) for tail in (2, 7, 13, 23)),
                    *((config, accum, 46, 23) for accum in (1, 2)),  # uneven shares
                )
            },
            "reductions_of_a_step": reductions_of_a_step(config),
            "draws_after_restoring": draws_after_restoring(),
            "scores": [score(config, num_images) for num_images in (37, 3)],
        }
        if coordinator.world.rank == 0:
            Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
