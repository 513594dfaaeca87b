"""A rank of `python -m benchmarks.divergence`: blocks of steps, and blocks of checks."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.divergence import rank_options
from mpiddp.bench.ranks.training import (
    bare_step,
    build,
    open_source,
    settings,
    synthetic_job,
)
from mpiddp.bench.result_lines import emit
from mpiddp.runtime.torch.divergence import check_divergence
from mpiddp.train.measure import StepTimer, slowest
from mpiddp.world import World

WARMUP = 5  # steps: they create the momentum


def main() -> None:
    options, training = rank_options(sys.argv[1:])
    with synthetic_job(World.from_env(), training) as job:
        data = open_source(job)
        state = build(job, data)
        [(images, labels)] = data.train.batches([torch.arange(job.config.batch_size)], epoch=0)

        def step() -> None:
            bare_step(state, job.config, images, labels)

        def check() -> None:
            check_divergence(state.model, state.optimizer)

        _timed(step, WARMUP, job.device)
        _timed(check, 1, job.device)
        found: dict[str, list[list[float]]] = {"step_s": [], "check_s": []}
        for _ in range(options.rounds):
            found["step_s"].append(_timed(step, options.steps, job.device))
            found["check_s"].append(_timed(check, options.checks, job.device))
        if job.is_rank_0:
            emit(
                {
                    **found,
                    "ranks": job.coordinator.world.world_size,
                    "num_tensors": 2 * len(list(state.model.parameters())),
                    "settings": settings(job),
                    "hosts": job.hosts,
                }
            )


def _timed(run: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """The seconds of each call on its slowest rank."""
    dist.barrier()
    timer = StepTimer(device)
    timer.resume()
    for _ in range(count):
        run()
        timer.tick()
    return slowest(timer.read(), device)


if __name__ == "__main__":
    main()
