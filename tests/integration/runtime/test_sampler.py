"""`mpiddp.Sampler` with the loaders of torch and torchdata: each sample once an epoch."""

import itertools
import os

import pytest
from torch.utils.data import DataLoader, IterableDataset

import mpiddp
from tests.support.installs import environment

SAMPLES, BATCH = 103, 12
STEPS = SAMPLES // BATCH
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def sampler_of(rank: int, world_size: int, **options: int) -> mpiddp.Sampler:
    return mpiddp.Sampler(SAMPLES, BATCH, rank=rank, world_size=world_size, **options)


def loader_of(sampler: mpiddp.Sampler, workers: int) -> DataLoader:
    return DataLoader(range(SAMPLES), batch_sampler=sampler, num_workers=workers, collate_fn=list)


class Numbers(IterableDataset):
    """A stream that has the batches of the sampler."""

    def __init__(self, sampler: mpiddp.Sampler) -> None:
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)


def stream_of(sampler: mpiddp.Sampler, workers: int) -> DataLoader:
    return DataLoader(
        Numbers(sampler),
        batch_size=None,
        num_workers=workers,
        collate_fn=list,
        persistent_workers=workers > 0,
    )


def steps_of(sampler, loader, number: int) -> list[list[int]]:
    """The next batches of a rank, over the ends of epochs."""
    batches = []
    while len(batches) < number:
        batches += itertools.islice(sampler.batches(loader), number - len(batches))
    return batches


def global_steps(ranks: int, number: int, state=None, make=loader_of, workers=0):
    """The samples of each step over all ranks, and the states of the ranks after the last one."""
    samplers = [sampler_of(rank, ranks) for rank in range(ranks)]
    batches = []
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
        batches.append(steps_of(sampler, make(sampler, workers), number))
    steps = [[*itertools.chain(*of_ranks)] for of_ranks in zip(*batches, strict=True)]
    assert all(len(step) == len({*step}) for step in steps)
    return [{*step} for step in steps], [sampler.state_dict() for sampler in samplers]


@pytest.mark.parametrize("make", [loader_of, stream_of])
@WORKERS
def test_a_resume_amid_an_epoch_on_other_ranks_goes_on_with_the_same_samples(make, workers):
    """Workers that run ahead do not count, and workers that persist begin the next epoch themselves."""
    whole, _ = global_steps(2, 2 * STEPS + 3)
    for epoch in (whole[:STEPS], whole[STEPS : 2 * STEPS]):
        assert len(set.union(*epoch)) == STEPS * BATCH
    assert whole[:STEPS] != whole[STEPS : 2 * STEPS]
    first, states = global_steps(2, STEPS + 5, make=make, workers=workers)
    assert states[0] == states[1]
    rest, _ = global_steps(3, STEPS - 2, states[0], make=make, workers=workers)
    assert first + rest == whole


@WORKERS
def test_a_loop_that_breaks_off_goes_on_in_the_next_one(workers):
    """Workers that persist begin where the sampler is, and not with an epoch that they have counted."""
    sampler = sampler_of(0, 1)
    loader = stream_of(sampler, workers)
    first = [*itertools.islice(sampler.batches(loader), 3)]
    assert (sampler.epoch, sampler.step) == (0, 3)
    assert [*first, *sampler.batches(loader)] == [batch.tolist() for (batch,) in sampler.indices(0)]


def test_a_loader_of_another_order_is_refused():
    sampler = sampler_of(0, 1)
    with pytest.raises(ValueError, match="the loader has another order"):
        next(sampler.batches(DataLoader(range(SAMPLES), batch_size=BATCH)))
    with pytest.raises(ValueError, match=f"more batches than the {STEPS} of this epoch"):
        list(sampler.batches(range(STEPS + 1)))


def test_the_end_of_an_epoch_is_the_beginning_of_the_next():
    """A save in the body of the loop, at the last step of an epoch, has the step as made."""
    sampler = sampler_of(0, 1)
    for _ in sampler.batches(loader_of(sampler, 0)):
        state = sampler.state_dict()
    assert (state["epoch"], state["step"]) == (0, STEPS)
    resumed = sampler_of(0, 1)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.step, len(resumed)) == (1, 0, STEPS)


def test_micro_batches_share_the_samples_of_a_step():
    sampler = sampler_of(1, 2, batches_per_step=2, steps_per_epoch=3)
    whole = [batch for step in sampler_of(1, 2).indices(0) for batch in step]
    loader = sampler.batches(loader_of(sampler, 0))
    parts = [next(loader), next(loader), next(loader)]
    assert parts[0] + parts[1] == whole[0].tolist()
    assert (sampler.step, len(sampler)) == (1, 4)


@WORKERS
def test_a_stateful_loader_resumes_itself(workers, monkeypatch):
    monkeypatch.syspath_prepend(environment("torchdata")["PYTHONPATH"].split(os.pathsep)[1])
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader():
        return StatefulDataLoader(
            range(SAMPLES), batch_sampler=sampler_of(0, 2), num_workers=workers, collate_fn=list
        )

    whole = list(loader())
    stopped = loader()
    first = list(itertools.islice(stopped, 3))
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert first + list(resumed) == whole


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 1])
def test_any_seed_of_64_bits(seed):
    first, second = (next(sampler_of(0, 1, seed=seed + n).indices(1))[0].tolist() for n in (0, 1))
    assert first != second


def test_other_data_or_another_order_is_refused():
    state = sampler_of(0, 1).state_dict()
    with pytest.raises(ValueError, match="the checkpoint has seed=0, and this run 1"):
        sampler_of(0, 1, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"larger than the data set \(5 samples\)"):
        mpiddp.Sampler(5, 12)
    with pytest.raises(ValueError, match="too small for 3 ranks with 5 batches"):
        mpiddp.Sampler(SAMPLES, BATCH, rank=0, world_size=3, batches_per_step=5)
