"""`mpiddp train --check-determinism`: run the first steps twice from the same start, and compare every bit.

The two runs are those of the training loop: its data, its augmentation, its random numbers, DDP with its
final buckets, or the shards of --parallel fsdp. A run leaves one digest of 8 bytes for each tensor of a
step, so the check needs no memory to speak of. Within a step, the tensors stand in the order in which a step
computes them. So the first one that differs is nearest to the cause.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from mpiddp.errors import DONE, STOPPED, JobFailed
from mpiddp.runtime.log import log
from mpiddp.runtime.torch.divergence import digest
from mpiddp.runtime.torch.steps import should_stop
from mpiddp.text import counted
from mpiddp.train.config import TrainConfig
from mpiddp.train.data.dataset import Batch
from mpiddp.train.engine import TrainState, train_step
from mpiddp.train.loop import TrainInputs, build_state
from mpiddp.train.opening import batches_of
from mpiddp.train.parallel import clear_gradients

_GATHER_TIMEOUT_S = 600.0


class Kind(IntEnum):
    """The tensors of a step, in the order in which it computes them."""

    IMAGES = 0
    LABELS = 1
    BUFFER = 2  # in the forward pass
    LOSS = 3
    GRADIENT = 4  # from the last parameter to the first, as the backward pass
    PARAMETER = 5
    OPTIMIZER = 6


TensorKey = tuple[Kind, int, str]  # a kind, the number of the tensor within it, and its name
Trace = list[dict[TensorKey, int]]  # the digests of each step


@dataclass(frozen=True)
class Difference:
    """The first tensor whose bits differ between the two runs of this rank."""

    step: int
    kind: int
    number: int  # among the tensors of its kind
    name: str
    num_different: int  # tensors of this step on this rank
    num_tensors: int

    @property
    def order(self) -> tuple[int, int, int]:
        return self.step, self.kind, self.number


def check_determinism(inputs: TrainInputs) -> int:
    """Train the first steps twice. A collective: every rank must call it, within the process group.

    Writes no file. Rank 0 prints the result.

    Returns:
        DONE if all bits are equal; STOPPED if the job was requested to stop.

    Raises:
        SystemExit: code 1, because some bits differ. Rank 0 has printed the step, the rank and the tensor.
    """
    config, coordinator = inputs.config, inputs.coordinator
    first = _train(inputs)
    gc.collect()  # a model under DDP refers to itself, and its memory may be needed for the second
    second = _train(inputs) if first is not None else None
    if first is None or second is None:
        log.info("stopped before the two runs could be compared.")
        return STOPPED
    own = first_difference(first, second)
    found = coordinator.all_gather_json(
        None if own is None else asdict(own), timeout_s=_GATHER_TIMEOUT_S
    )
    differences = {rank: Difference(**each) for rank, each in enumerate(found) if each}
    runs = f"two runs of {counted(len(first), 'step')} from the same start"
    if not differences:
        log.info(
            f"{runs} are equal bit for bit on {counted(len(found), 'rank')}, in each of "
            f"{len(first[0])} tensors of a step.{_limit(config, inputs.device)}"
        )
        return DONE
    rank = min(differences, key=lambda rank: (*differences[rank].order, rank))
    where = differences[rank]
    with coordinator.all_or_none():
        raise JobFailed(
            f"{runs} differ: first in step {where.step}, on rank {rank} on "
            f"{coordinator.hostnames[rank]}, in {where.name} ({where.num_different} of "
            f"{where.num_tensors} tensors of that step).{_hint(where, config, inputs.device)}"
        )


def first_difference(first: Trace, second: Trace) -> Difference | None:
    """The first digest of `first` that `second` does not have, by step and by order in the step."""
    for step, (a, b) in enumerate(zip(first, second, strict=True), start=1):
        different = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
        if different:
            kind, number, name = different[0]
            return Difference(step, kind, number, name, len(different), len(a.keys() | b.keys()))
    return None


def _train(inputs: TrainInputs) -> Trace | None:
    """Train the first steps, and return their digests; None if the job was requested to stop."""
    config, plan, data = inputs.config, inputs.plan, inputs.data
    assert config.check_determinism is not None
    num_steps = min(config.check_determinism, plan.total_steps)
    state, ddp = build_state(replace(inputs, model=copy.deepcopy(inputs.model)))
    recorder = Recorder(state)
    done = 0
    for epoch in range(config.epochs):
        steps = list(plan.order.steps(epoch))[: num_steps - done]
        batches = recorder.record(batches_of(steps, data, config, inputs.device, epoch=epoch))
        for step in steps:
            recorder.end_step(train_step(state, ddp, batches, step, plan.lr(done), config))
            clear_gradients(ddp, config)
            done += 1
            if should_stop():
                return None
        if done == num_steps:
            break
    return recorder.read()


class Recorder:
    """Records the digest of every tensor of a training's steps."""

    def __init__(self, state: TrainState) -> None:
        self._model, self._optimizer = state.model, state.optimizer
        self._optimizer.register_step_pre_hook(self._before_update)
        self._optimizer.register_step_post_hook(self._after_update)
        self._step: dict[TensorKey, Tensor] = {}
        self._counts: Counter[Kind] = Counter()  # tensors of this step
        self._digests: list[tuple[list[TensorKey], Tensor]] = []

    def record(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        for images, labels in batches:
            number = self._counts[Kind.IMAGES]
            of_pass = f" of backward pass {number + 1}" if number else ""
            self._add(Kind.IMAGES, f"the images{of_pass}", images)
            self._add(Kind.LABELS, f"the labels{of_pass}", labels)
            yield images, labels

    def _before_update(self, *_: object) -> None:
        for name, buffer in self._model.named_buffers():
            self._add(Kind.BUFFER, f"the buffer {name}", buffer)
        for name, parameter in reversed(list(self._model.named_parameters())):
            if parameter.grad is not None:
                self._add(Kind.GRADIENT, f"the gradient of {name}", parameter.grad)

    def _after_update(self, *_: object) -> None:
        for name, parameter in self._model.named_parameters():
            self._add(Kind.PARAMETER, f"the parameter {name}", parameter)
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    self._add(Kind.OPTIMIZER, f"the {key} of {name}", value)

    def _add(self, kind: Kind, name: str, tensor: Tensor) -> None:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # this rank's shard
        self._step[kind, self._counts[kind], name] = digest(own)
        self._counts[kind] += 1

    def end_step(self, loss: Tensor) -> None:
        self._add(Kind.LOSS, "the loss", loss)
        digests = torch.stack([each.to(loss.device) for each in self._step.values()])
        self._digests.append((list(self._step), digests))
        self._step, self._counts = {}, Counter()

    def read(self) -> Trace:
        """The digests of all steps. On a GPU this waits for the last one."""
        return [dict(zip(keys, digests.tolist(), strict=True)) for keys, digests in self._digests]


def _hint(where: Difference, config: TrainConfig, device: torch.device) -> str:
    if where.kind in (Kind.IMAGES, Kind.LABELS):
        return " The data source gives other values for the same numbers of images."
    return "" if device.type == "cpu" or config.deterministic else " Try --deterministic."


def _limit(config: TrainConfig, device: torch.device) -> str:
    """What the comparison of two runs in one job cannot show."""
    if device.type == "cpu" or config.deterministic:
        return ""
    return " Another job may choose other kernels; with --deterministic it chooses the same ones."
