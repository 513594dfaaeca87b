"""`mpiddp train --check-determinism`: run the first steps twice from the same start, and compare every bit.

The two runs are those of the training loop: its data, its augmentation, its random numbers, DDP with its
final buckets, or the shards of --parallel fsdp. A run leaves one digest of 8 bytes for each tensor of a
step, so the check needs no memory to speak of. Within a step, the tensors stand in the order in which a step
computes them. So the first one that differs is nearest to the cause.
"""

from __future__ import annotations

import gc
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

import mpiddp
from mpiddp.errors import DONE, STOPPED, JobFailed
from mpiddp.train.config import gathered
from mpiddp.train.datasets import Batch, Data, batches
from mpiddp.train.measure import counted
from mpiddp.train.order import Order
from mpiddp.train.parallel import clear_gradients
from mpiddp.train.step import State, learning_rate, train_step

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
log = logging.getLogger("mpiddp")

Trace = list[dict[str, int]]  # the digests of each step, by the name of the tensor, in their order


def check_determinism(
    config: Namespace,
    data: Data,
    order: Order,
    world: mpiddp.World,
    build: Callable[[], tuple[State, nn.Module]],
) -> int:
    """Train the first steps twice. A collective: every rank must call it. Writes no file.

    Returns DONE if all bits are equal, STOPPED if the job was requested to stop. If some bits differ, all
    ranks exit with code 1, and rank 0 prints the step, the rank and the tensor.

    Args:
        build: the state with fresh weights, and the model to call.
    """
    first = _train(config, data, order, *build())
    gc.collect()  # a model under DDP refers to itself, and its memory may be needed for the second
    second = _train(config, data, order, *build()) if first is not None else None
    if first is None or second is None:
        log.info("stopped before the two runs could be compared.")
        return STOPPED
    found, hosts = gathered(first_difference(first, second)), gathered(world.hostname)
    runs, tensors = f"two runs of {len(first)} steps from the same start", len(first[0])
    differences = [(each, rank) for rank, each in enumerate(found) if each is not None]
    with mpiddp.together():
        if differences:
            (step, _, name, num_different), rank = min(differences)
            hint = "" if config.deterministic else " Try --deterministic."
            raise JobFailed(
                f"{runs} differ: first in step {step}, on rank {rank} on {hosts[rank]}, in {name} "
                f"({num_different} of {tensors} tensors of that step).{hint}"
            )
    ranks = counted(len(found), "rank")
    log.info(f"{runs} are equal bit for bit on {ranks}, in each of {tensors} tensors of a step.")
    return DONE


def first_difference(first: Trace, second: Trace) -> tuple[int, int, str, int] | None:
    """The step, the number in it and the name of the first tensor that differs, and how many of it do."""
    for step, (a, b) in enumerate(zip(first, second, strict=True), start=1):
        names = list(dict.fromkeys([*a, *b]))
        different = [name for name in names if a.get(name) != b.get(name)]
        if different:
            return step, names.index(different[0]), different[0], len(different)
    return None


def _train(
    config: Namespace, data: Data, order: Order, state: State, ddp: nn.Module
) -> Trace | None:
    """Train the first steps, and return their digests; None if the job was requested to stop."""
    num_steps = min(config.check_determinism, order.steps_per_epoch * config.epochs)
    device = next(ddp.parameters()).device
    trace: list[dict[str, Tensor]] = []
    for epoch in range(config.epochs):
        steps = list(islice(order.steps(epoch), num_steps - len(trace)))
        numbers = [images for micro_batches in steps for images in micro_batches]
        images_of_epoch = batches(data.train, numbers, config, device, epoch=epoch)
        for _ in steps:
            digests: dict[str, Tensor] = {}
            lr = learning_rate(len(trace), order.steps_per_epoch, config)
            loss = train_step(state, ddp, _recorded(images_of_epoch, digests), lr, config)
            digests |= {name: digest(tensor) for name, tensor in _tensors(state, loss)}
            trace.append(digests)
            clear_gradients(ddp, config)
            if mpiddp.should_stop():
                return None
    return [{name: int(value) for name, value in digests.items()} for digests in trace]


def _recorded(images_and_labels: Iterator[Batch], digests: dict[str, Tensor]) -> Iterator[Batch]:
    """The same batches."""
    for images, labels in images_and_labels:
        number = 1 + len(digests) // 2
        digests[f"the images of backward pass {number}"] = digest(images)
        digests[f"the labels of backward pass {number}"] = digest(labels)
        yield images, labels


def _tensors(state: State, loss: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a step has computed, in that order."""
    yield "the loss", loss
    for name, buffer in state.model.named_buffers():
        yield f"the buffer {name}", buffer
    for name, parameter in reversed(list(state.model.named_parameters())):
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    for name, parameter in state.model.named_parameters():
        yield f"the parameter {name}", parameter
        for key, value in sorted(state.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"the {key} of {name}", value


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers: int64 [], on its device. Of a DTensor, that of its shard.

    A flipped bit changes it by a power of 2 below 2^64, so it always changes the sum mod 2^64. Integers add
    up to the same sum in any order, so the digest does not depend on the number of threads.
    """
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = own.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
