"""A rank of `mpiddp bench step`: the runner's loop, a bare loop, and the parts of a step.

All measurements are blocks of steps that alternate within one job, so other work of the machines affects
all of them equally. The loops start each block with a fresh model.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mpiddp.bench.ranks.training import (
    EXCHANGE_TIMEOUT_S,
    Job,
    bare_step,
    build,
    build_bare,
    open_source,
    settings,
    synthetic_job,
    synthetic_order,
)
from mpiddp.bench.result_lines import emit
from mpiddp.bench.rounds import turns
from mpiddp.bench.step import BARE, BARE_AGAIN, PHASES, RUNNER, STEP, rank_options
from mpiddp.train.checkpoint import Progress, open_checkpoints
from mpiddp.train.datasets import Batch, Data, prefetched
from mpiddp.train.measure import STARTUP_STEPS, StepTimer, slowest
from mpiddp.train.order import Order
from mpiddp.train.parallel import wrap
from mpiddp.train.step import State, autocast, learning_rate
from mpiddp.train.train import fit
from mpiddp.world import World


def run(world: World, argv: list[str]) -> None:
    options, training = rank_options(argv)
    count = STARTUP_STEPS + options.steps
    with synthetic_job(world, training) as job:
        data = open_source(job)
        phases_data = data
        if options.real_data:
            phases_data = open_source(replace(job, config=_changed(job.config, use_syn=False)))
        with _scratch_folder(job) as folder:
            loops = _loops(job, data, folder, count, options.rounds)
        phases = _phases(job, phases_data, count, options.rounds)
        gathered = job.coordinator.all_gather_json(phases, timeout_s=EXCHANGE_TIMEOUT_S)
        if job.is_rank_0:
            emit(
                {
                    "loops": loops,
                    "phases": gathered,
                    "hostnames": list(job.coordinator.hostnames),
                    "data": phases_data.name,
                    "settings": settings(job),
                    "hosts": job.hosts,
                }
            )


def _loops(job: Job, data: Data, folder: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """Measure the mean seconds of a step in each block of each loop, without the start-up."""
    order = synthetic_order(job, data, count)
    numbers = [step.micro_batches[0] for step in order.steps(epoch=0)]
    tensors = list(data.train.batches(numbers, epoch=0))
    blocks: dict[str, Callable[[Path], float]] = {
        RUNNER: lambda out: _time_runner(job, data, order, out),
        BARE: lambda _: _time_bare_loop(job, data, tensors, order),
        BARE_AGAIN: lambda _: _time_bare_loop(job, data, tensors, order),
    }
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for number, name in turns(list(blocks), rounds):
        seconds[name].append(blocks[name](folder / str(number)))
    return seconds


def _changed(config: Namespace, **values: object) -> Namespace:
    return Namespace(**{**vars(config), **values})


def _time_runner(job: Job, data: Data, order: Order, out: Path) -> float:
    """The seconds of a step as `mpiddp train` itself measures them."""
    config = _changed(job.config, epochs=1, low_res_epochs=0, out=str(out))
    bare = build_bare(job.coordinator, config, data, job.device)
    ddp = wrap(bare.model, config, data.shape, [])
    with open_checkpoints(out, config, data.contents) as checkpoints:
        checkpoints.resume()
        world = job.coordinator.world
        summary = fit(config, world, data, order, bare, ddp, checkpoints, Progress())
    assert summary is not None
    return float(summary["global_batch_size"] / summary["images_per_s"])


def _time_bare_loop(job: Job, data: Data, batches: list[Batch], order: Order) -> float:
    """The seconds of a step in a hand-written loop with the same settings.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    state = build(job, data)
    timer = StepTimer(job.device)
    timer.resume()
    for step, (images, labels) in enumerate(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step, order.steps_per_epoch, job.config)
        bare_step(state, job.config, images, labels)
        timer.tick()
    return mean(slowest(timer.read(), job.device)[STARTUP_STEPS:])


def _phases(job: Job, data: Data, count: int, rounds: int) -> dict[str, list[float]]:
    """This rank's mean seconds of each phase, one for each round.

    The phases are timed in steps without communication. The additional time of steps with communication
    is its exposed part, which does not overlap with computation.
    """
    state = build(job, data)
    found: dict[str, list[float]] = {name: [] for name in (*PHASES, STEP)}
    blocks: dict[bool, list[list[float]]] = {False: [], True: []}
    for _, syncs in turns(list(blocks), rounds):
        blocks[syncs].append(_time_phases(job, data, state, count, syncs))
    for alone, synced in zip(blocks[False], blocks[True], strict=True):
        load, forward, backward, optimizer, other = alone
        exposed = sum(synced) - sum(alone)
        parts_of_step = (load, forward, backward, exposed, optimizer, other)
        for name, seconds in zip(PHASES, parts_of_step, strict=True):
            found[name].append(seconds)
        found[STEP].append(sum(synced))
    return found


def _time_phases(job: Job, data: Data, state: State, count: int, syncs: bool) -> list[float]:
    """The mean seconds of data, forward, backward, optimizer and the rest in a block of steps."""
    config, device = job.config, job.device
    order = list(_random_batches(job, data, count))
    batches = prefetched(data.train.batches(order, epoch=0), device)
    loss_sum = torch.zeros((), device=device)
    timer = StepTimer(device)
    dist.barrier()
    timer.resume()
    for _ in range(count):
        images, labels = next(batches)
        timer.tick()
        with contextlib.nullcontext() if syncs else state.model.no_sync():  # type: ignore[operator]
            with autocast(config, device):
                loss = F.cross_entropy(state.model(images), labels)
            timer.tick()
            state.scaler.scale(loss).backward()
        timer.tick()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        timer.tick()
        for group in state.optimizer.param_groups:
            group["lr"] = config.lr
        loss_sum += loss.detach()
        timer.tick()
    ticks = timer.read()[STARTUP_STEPS * TICKS :]
    return [mean(ticks[phase::TICKS]) for phase in range(TICKS)]


TICKS = 5  # of the timer in one step


def _random_batches(job: Job, data: Data, count: int) -> Iterator[torch.Tensor]:
    """The image numbers of `count` random batches of this rank."""
    generator = torch.Generator().manual_seed(job.coordinator.world.rank)
    for _ in range(count):
        high = data.train.num_images
        yield torch.randint(high, (job.config.batch_size,), generator=generator)


@contextlib.contextmanager
def _scratch_folder(job: Job) -> Iterator[Path]:
    """A temporary folder on rank 0's host for the records and checkpoints of the runner's loop."""
    path = Path(
        job.coordinator.broadcast_json(
            tempfile.mkdtemp(prefix="mpiddp-bench-") if job.is_rank_0 else ""
        )
    )
    try:
        yield path
    finally:
        if job.is_rank_0:
            shutil.rmtree(path)
