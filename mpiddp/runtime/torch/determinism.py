"""`mpiddp.check_determinism`: train the first steps twice, and compare all bits.

A run leaves a digest of each tensor of a step, in the order in which the step computes them. So the first one
that differs is nearest to the cause.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpiddp.errors import JobFailed
from mpiddp.runtime.reports import together
from mpiddp.runtime.torch.divergence import digest, of_all_ranks
from mpiddp.world import World

Training = tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]


def check_determinism(begin: Callable[[], Training], *, steps: int = 10) -> int:
    """Check that a training repeats itself bit for bit. A collective: every rank must call it.

        def begin():
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, optimizer, (train_one_step(model, optimizer, batch) for batch in batches(seed=0))

        mpiddp.check_determinism(begin)

    Args:
        begin: called twice. It returns a fresh model, its optimizer, and an iterator that makes a step and
            yields the step's loss, a scalar tensor.
        steps: to make in each run.

    Returns:
        The number of tensors that were compared in each step.

    Raises:
        JobFailed: on all ranks. It names the first step, the rank and the tensor that differ.
    """
    one = list(_digests(begin, steps))
    gc.collect()  # a model under DDP refers to itself, and its memory may be needed for the second run
    other = list(_digests(begin, steps))
    differing = {place: a or b for place, (a, b) in enumerate(zip_longest(one, other)) if a != b}  # one may end early
    first = min(differing, default=len(one))
    firsts, rank = (of_all_ranks(first), dist.get_rank()) if dist.is_initialized() else ([first], 0)
    tensors = sum(step == 1 for step, _, _ in one)
    world = World.from_env()
    with together():
        if differing and rank == firsts.index(min(firsts)):
            step, name, _ = differing[first]
            same_step = sum(row[0] == step for row in differing.values())
            share = f"{same_step} of {tensors} tensors of that step"
            raise JobFailed(
                f"two runs of {one[-1][0]} steps from the same start differ: first in step {step}, on rank "
                f"{rank} on {world.hostname}, in {name} ({share})."
            )
    return tensors


def _digests(begin: Callable[[], Training], steps: int) -> Iterator[tuple[int, str, int]]:
    """Train the first steps. The step, the name and the digest of each tensor, in their order."""
    model, optimizer, losses = begin()
    for step, loss in enumerate(islice(losses, steps), start=1):
        for name, tensor in _tensors(model, optimizer, loss):
            yield step, name, int(digest(tensor))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a step has computed, in that order."""
    yield "the loss", loss
    for name, buffer in model.named_buffers():
        yield f"the buffer {name}", buffer
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    for name, parameter in model.named_parameters():
        yield f"the parameter {name}", parameter
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"the {key} of {name}", value
