"""Comparisons of bits: of the ranks among themselves, and of two runs from the same start.

--check-determinism runs the first steps twice: with the data, the augmentation and the random numbers of the
training, with DDP's final buckets, or with shards. A run leaves a digest of each tensor of a step, in the
order in which the step computes them. So the first one that differs is nearest to the cause.
"""

from __future__ import annotations

import gc
import logging
import zlib
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

import mpiddp
from mpiddp.errors import JobFailed, UserError
from mpiddp.train.config import Config
from mpiddp.train.data import Data
from mpiddp.train.measure import gathered
from mpiddp.train.order import Order
from mpiddp.train.records import counted
from mpiddp.train.sharded import ranks_with_same_shards
from mpiddp.train.state import State, build_model, build_state
from mpiddp.train.train import Hook, Step, train

log = logging.getLogger("mpiddp")


def require_equal(what: str, value: str, hint: str) -> None:
    """Raise UserError unless the values of all ranks are equal. A collective."""
    values = gathered(value)
    if len(set(values)) > 1:
        found = ", ".join(f"{each} (rank {values.index(each)})" for each in dict.fromkeys(values))
        raise UserError(f"{what} differs: {found}. {hint}")


class Divergence(Hook):
    """Compares the ranks every `--check-divergence` steps and before every save; ends the job if they differ.

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


def check_determinism(config: Config, data: Data, order: Order, world: mpiddp.World) -> None:
    """Train the first steps twice, each time with a fresh model. A collective. Writes no file.

    If some bits differ, all ranks exit with code 1, and the step, the rank and the tensor are printed.
    """
    one = _digests(config, data, order, world)
    gc.collect()  # a model under DDP refers to itself, and its memory may be needed for the second
    other = _digests(config, data, order, world)
    runs = f"two runs of {one[-1][0]} steps from the same start"
    tensors = sum(step == 1 for step, _, _ in one)
    differing = [place for place, each in enumerate(one) if each != other[place]]
    firsts = gathered(differing[0] if differing else len(one))
    with mpiddp.together():
        if differing and world.rank == firsts.index(min(firsts)):
            step, name, _ = one[differing[0]]
            same_step = sum(one[place][0] == step for place in differing)
            hint = "" if config.deterministic else " Try --deterministic."
            raise JobFailed(
                f"{runs} differ: first in step {step}, on rank {world.rank} on {world.hostname}, in {name} "
                f"({same_step} of {tensors} tensors of that step).{hint}"
            )
    ranks = counted(len(firsts), "rank")
    log.info(f"{runs} are equal bit for bit on {ranks}, in each of {tensors} tensors of a step.")


def _digests(
    config: Config, data: Data, order: Order, world: mpiddp.World
) -> list[tuple[int, str, int]]:
    """Train the first steps. Returns the step, the name and the digest of each tensor, in their order."""
    model = build_model(config, data, data.train.device)
    state = build_state(model, config, world.num_nodes or 1)
    steps = islice(train(config, data, order, state, step=0), config.check_determinism)
    return [
        (step.number, name, digest(tensor))
        for step in steps
        for name, tensor in _tensors(state, step.loss_sum)
    ]


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


def digest(tensor: Tensor) -> int:
    """The CRC of a tensor's bits, which one flipped bit always changes. Of a DTensor, that of its shard."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = own.detach().contiguous().reshape(-1).cpu()
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
