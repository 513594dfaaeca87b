"""Comparisons of bits: of the ranks among themselves, and of two runs from the same start.

--check-determinism runs the first steps twice: with the data, the augmentation and the random numbers of the
training, with DDP's final buckets, or with shards. A run leaves a digest of 8 bytes for each tensor of a
step, in the order in which the step computes them. So the first one that differs is nearest to the cause.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mpiddp
from mpiddp.errors import JobFailed, UserError
from mpiddp.train.config import Config
from mpiddp.train.data import Batch, Data, Dataset
from mpiddp.train.order import Order
from mpiddp.train.records import counted
from mpiddp.train.sharded import ranks_with_same_shards
from mpiddp.train.state import State, build_model, build_state
from mpiddp.train.train import Hook, Step, train

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
log = logging.getLogger("mpiddp")

Trace = list[
    list[tuple[str, int]]
]  # of each step, the name and digest of each tensor, in their order


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank: [world_size]. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_equal(what: str, value: str, hint: str) -> None:
    """Raise UserError unless the values of all ranks are equal. A collective."""
    values = gathered(value)
    if len(set(values)) > 1:
        found = ", ".join(f"{each} (rank {values.index(each)})" for each in dict.fromkeys(values))
        raise UserError(f"{what} differs: {found}. {hint}")


class Divergence(Hook):
    """Ends the job if the ranks differ, every so many steps and before every save.

    So a restart resumes from bits in which all ranks agreed.
    """

    def __init__(self, every: int, state: State) -> None:
        self._every, self._state = every, state

    def on_step(self, step: Step, *, saves: bool) -> None:
        if saves or step.number % self._every == 0:
            state = self._state
            with mpiddp.together():  # the ranks with other shards do not know
                same = ranks_with_same_shards(state.model)
                mpiddp.check_divergence(state.model, state.optimizer, step=step.number, group=same)
            state.timer.resume()


def check_determinism(
    config: Config, data: Data, order: Order, world: mpiddp.World, copies: list[list[int]]
) -> None:
    """Train the first steps twice, each time with a fresh model. A collective. Writes no file.

    If some bits differ, all ranks exit with code 1, and the step, the rank and the tensor are printed.
    """
    first = _train(config, data, order, copies)
    gc.collect()  # a model under DDP refers to itself, and its memory may be needed for the second
    second = _train(config, data, order, copies)
    runs, tensors = f"two runs of {len(first)} steps from the same start", len(first[0])
    found = gathered((_first_difference(first, second), world.rank, world.hostname))
    with mpiddp.together():
        if differing := [each for each in found if each[0]]:
            (step, _, name, num_different), rank, host = min(differing)
            hint = "" if config.deterministic else " Try --deterministic."
            raise JobFailed(
                f"{runs} differ: first in step {step}, on rank {rank} on {host}, in {name} "
                f"({num_different} of {tensors} tensors of that step).{hint}"
            )
    ranks = counted(len(found), "rank")
    log.info(f"{runs} are equal bit for bit on {ranks}, in each of {tensors} tensors of a step.")


def _first_difference(first: Trace, second: Trace) -> tuple[int, int, str, int] | None:
    """The first step that differs, its first tensor with its place in the step, how many differ there."""
    for step, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        differing = [place for place, each in enumerate(one) if each != other[place]]
        if differing:
            return step, differing[0], one[differing[0]][0], len(differing)
    return None


def _train(config: Config, data: Data, order: Order, copies: list[list[int]]) -> Trace:
    """Train the first steps, and return their digests."""
    state = build_state(build_model(config, data, data.train.device), config, copies)
    watched = _Watched(data.train)
    trace: list[list[tuple[str, Tensor]]] = []
    made = train(config, replace(data, train=watched), order, state, step=0)
    for step in islice(made, config.check_determinism):
        trace.append([*watched.taken(), *_tensors(state, step.loss_sum)])
    return [[(name, int(value)) for name, value in step] for step in trace]


class _Watched(Dataset):
    """A data set that keeps a digest of each batch."""

    def __init__(self, source: Dataset) -> None:
        self._source, self.num_images, self.device = source, source.num_images, source.device
        self._batches: list[tuple[Tensor, Tensor]] = []

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        for images, labels in self._source.batches(indices, epoch=epoch):
            self._batches.append((digest(images), digest(labels)))
            yield images, labels

    def taken(self) -> Iterator[tuple[str, Tensor]]:
        """The digests of the batches since the last call, one for each backward pass."""
        for number, (images, labels) in enumerate(self._batches, start=1):
            yield f"the images of backward pass {number}", images
            yield f"the labels of backward pass {number}", labels
        self._batches.clear()


def _tensors(state: State, loss: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Digests of what a step has computed, in that order."""
    yield "the loss", digest(loss)
    for name, buffer in state.model.named_buffers():
        yield f"the buffer {name}", digest(buffer)
    for name, parameter in reversed(list(state.model.named_parameters())):
        if parameter.grad is not None:
            yield f"the gradient of {name}", digest(parameter.grad)
    for name, parameter in state.model.named_parameters():
        yield f"the parameter {name}", digest(parameter)
        for key, value in sorted(state.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"the {key} of {name}", digest(value)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers: int64 [], on its device. Of a DTensor, that of its shard.

    A flipped bit changes it by a power of 2 below 2^64, so it always changes the sum mod 2^64. Integers add
    up to the same sum in any order, so the digest does not depend on the number of threads.
    """
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = own.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
