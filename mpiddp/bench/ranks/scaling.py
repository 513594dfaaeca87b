"""A rank of `mpiddp bench scaling`: steps of the training, each timed on the device's own clock."""

from __future__ import annotations

from mpiddp.bench.figures import Result
from mpiddp.bench.ranks.training import (
    build,
    open_source,
    settings,
    synthetic_job,
    synthetic_order,
)
from mpiddp.bench.scaling import Options
from mpiddp.train.data import batches
from mpiddp.train.measure import slowest
from mpiddp.train.train import backward
from mpiddp.world import World


def rank(world: World, options: Options, training: list[str]) -> Result:
    with synthetic_job(world, training) as job:
        data = open_source(job)
        state = build(job, data)
        steps = list(synthetic_order(job, data, options.warmup + options.steps).steps(epoch=0))
        images = batches(data.train, steps, job.config, epoch=0)
        timer = state.timer
        timer.resume()
        for _ in steps:
            backward(state, images, job.config)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            timer.tick()
        own = timer.read()[options.warmup :]
        *seconds, total = slowest([*own, sum(own)], job.device)
    return {
        "step_s": seconds,
        "total_s": total,
        "num_hosts": job.coordinator.world.num_nodes,
        "global_batch_size": job.config.global_batch_size,
        "settings": settings(job),
        "hosts": job.hosts,
    }
