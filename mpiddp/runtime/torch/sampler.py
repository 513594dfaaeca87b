"""`mpiddp.Sampler`: which rank trains on which sample, also after a resume on another number of ranks.

Each epoch has one permutation of all samples, cut into global batches. Step k of an epoch takes global batch
k and splits it over the ranks. So each sample occurs at most once in an epoch, the order does not depend on
the number of ranks, and a resume in the middle of an epoch needs only the number of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from mpiddp.world import World

Batch = TypeVar("Batch")


class Sampler(torch.utils.data.Sampler[list[int]]):
    """The batches of this rank: the `batch_sampler` of a DataLoader.

        sampler = mpiddp.Sampler(len(dataset), global_batch_size=512)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4, generator=torch.Generator())
        if saved := checkpoints.resume():
            saved.load_into(model=model, optimizer=optimizer, sampler=sampler)
        while sampler.epoch < EPOCHS:
            for images, labels in sampler.batches(loader):
                step += 1
                …
                if checkpoints.due(step):
                    checkpoints.save(step, {…, "sampler": sampler.state_dict()})

    `batches` counts what the loop has received. The workers of a DataLoader run ahead, so the sampler cannot
    know otherwise. With torchdata's StatefulDataLoader, save the loader instead: it counts itself.

    Pass `generator=torch.Generator()` to a DataLoader whose run has to resume with the same bits. Otherwise
    it draws from torch's generator whenever a loop begins, and a resume begins one more.

    An `IterableDataset` iterates over the sampler itself, and its DataLoader has `batch_size=None`. In the
    workers of a DataLoader, each then yields its part of the batches, and the DataLoader restores their order.

    Attributes:
        epoch: from 0; the one that the next batch belongs to.
        step: steps of this epoch that `batches` has delivered.
        steps_per_epoch: whole global batches in an epoch. The samples after the last one are left out, and
            the next epoch has another permutation.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        batches_per_step: int = 1,
        steps_per_epoch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """
        Args:
            num_samples: the samples are numbered from 0 to this, exclusive.
            global_batch_size: samples of one step over all ranks. If the division leaves a remainder, some
                ranks have one sample less.
            seed: of the permutations; the same on every rank.
            shuffle: False for the order of the numbers, in each epoch.
            batches_per_step: micro-batches of a step, for gradient accumulation.
            steps_per_epoch: end each epoch after this many steps.
            rank: of this process in the data parallelism, if that is not over all ranks of the job.
            world_size: the number of ranks of that data parallelism.

        Raises:
            ValueError: an epoch would have no step, or a rank no sample in a micro-batch.
        """
        world = World.from_env()  # right before the process group is formed, too
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else world[:2]
        self.rank = group[0] if rank is None else rank
        self.world_size = group[1] if world_size is None else world_size
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.seed, self.shuffle, self.batches_per_step = seed, shuffle, batches_per_step
        if global_batch_size < self.world_size * batches_per_step:
            raise ValueError(
                f"mpiddp.Sampler: global_batch_size={global_batch_size} is too small for "
                f"{self.world_size} ranks with {batches_per_step} batches in a step each."
            )
        whole = num_samples // global_batch_size
        self.steps_per_epoch = whole if steps_per_epoch is None else min(whole, steps_per_epoch)
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"mpiddp.Sampler: global_batch_size={global_batch_size} is larger than the data set "
                f"({num_samples} samples)."
            )
        self.epoch = self.step = 0
        # Where a loop begins: a worker that persists has a copy of this object, and sees only shared memory.
        self._start = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()

    def __len__(self) -> int:
        """The batches of this rank that are left of the epoch."""
        return (self.steps_per_epoch - self.step) * self.batches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        """The numbers of the samples of each batch, to the end of the epoch."""
        worker = get_worker_info()
        if worker is None:
            return _Batches(self, self.epoch, self.step)
        # A DataLoader takes one batch from each worker in turn.
        return itertools.islice(
            _Batches(self, *self._start.tolist()), worker.id, None, worker.num_workers
        )

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch, as with torch's DistributedSampler. `batches` does it itself."""
        self._go_to(epoch, 0)

    def _go_to(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step
        self._start[:] = torch.tensor([epoch, step])

    def indices(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """This rank's batches of each step of an epoch, from its step `first` on.

        Returns:
            For each step, `batches_per_step` tensors, int64 [samples].
        """
        order = torch.arange(self.num_samples)
        if self.shuffle:
            seed = (self.seed * 1_000_003 + epoch) % (1 << 64)  # torch takes 64 bits
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self.num_samples, generator=generator)
        for batch in order.split(self.global_batch_size)[first : self.steps_per_epoch]:
            share = torch.tensor_split(batch, self.world_size)[self.rank]
            yield torch.tensor_split(share, self.batches_per_step)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """What the loader delivers for the rest of this epoch; then the next epoch begins.

        The step of a batch counts from the moment that its last micro-batch is delivered, so a checkpoint in
        the body of the loop has the step as made.

        Raises:
            ValueError: the batches of the loader are not those of this sampler.
        """
        if getattr(loader, "batch_sampler", None) not in (None, self):
            sentence = "mpiddp.Sampler: the loader has another order. Write: DataLoader(…, batch_sampler=sampler)"
            raise ValueError(sentence)
        self._go_to(self.epoch, self.step)
        before, left = self.step, len(self)
        for count, batch in enumerate(loader, start=1):
            if count > left:
                raise ValueError(
                    f"mpiddp.Sampler: the loader has more batches than the {left} of this epoch."
                )
            self.step = before + count // self.batches_per_step
            yield batch
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what decides the order; equal on all ranks."""
        decides = ("num_samples", "global_batch_size", "seed", "shuffle", "steps_per_epoch")
        return {name: getattr(self, name) for name in ("epoch", "step", *decides)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the position of this state, on any number of ranks.

        Raises:
            ValueError: the state is of other data or of another order.
        """
        now = self.state_dict()
        for name in now.keys() - {"epoch", "step"}:
            if state[name] != now[name]:
                raise ValueError(
                    f"mpiddp.Sampler: the checkpoint has {name}={state[name]}, and this run {now[name]}."
                )
        self._go_to(state["epoch"], state["step"])
        if self.step == self.steps_per_epoch:
            self.set_epoch(self.epoch + 1)


class _Batches(Iterator[list[int]]):
    """The batches from the position of a sampler on. torchdata's StatefulDataLoader saves theirs."""

    def __init__(self, sampler: Sampler, epoch: int, step: int) -> None:
        self._sampler = sampler
        self._begin(epoch, step * sampler.batches_per_step)

    def _begin(self, epoch: int, drawn: int) -> None:
        self._epoch, self._drawn = epoch, drawn
        step, begun = divmod(drawn, self._sampler.batches_per_step)
        batches = itertools.chain.from_iterable(self._sampler.indices(epoch, step))
        self._rest = itertools.islice(batches, begun, None)

    def __next__(self) -> list[int]:
        batch: list[int] = next(self._rest).tolist()
        self._drawn += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin(state["epoch"], state["drawn"])
