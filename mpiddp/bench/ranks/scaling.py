"""A rank of `mpiddp bench scaling`: steps of the training, each timed on the device's own clock."""

from __future__ import annotations

from mpiddp.bench.ranks.training import (
    build,
    open_source,
    settings,
    synthetic_job,
    synthetic_order,
)
from mpiddp.bench.result_lines import emit
from mpiddp.bench.scaling import rank_options
from mpiddp.train.datasets import prefetched
from mpiddp.train.measure import StepTimer, slowest
from mpiddp.train.parallel import clear_gradients
from mpiddp.train.step import backward
from mpiddp.world import World


def run(world: World, argv: list[str]) -> None:
    options, training = rank_options(argv)
    with synthetic_job(world, training) as job:
        data = open_source(job)
        state = build(job, data)
        synthetic = synthetic_order(job, data, options.warmup + options.steps)
        steps = list(synthetic.steps(epoch=0))
        order = [numbers for step in steps for numbers in step.micro_batches]
        batches = prefetched(data.train.batches(order, epoch=0), job.device)
        timer = StepTimer(job.device)
        timer.resume()
        for step in steps:
            backward(state.model, batches, step, state.scaler, job.config)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            clear_gradients(state.model, job.config)
            timer.tick()
        own = timer.read()[options.warmup :]
        *seconds, total = slowest([*own, sum(own)], job.device)
        if job.is_rank_0:
            emit(
                {
                    "step_s": seconds,
                    "total_s": total,
                    "num_hosts": job.coordinator.world.num_nodes,
                    "global_batch_size": job.config.global_batch_size,
                    "settings": settings(job),
                    "hosts": job.hosts,
                }
            )
