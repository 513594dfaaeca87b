"""A rank of `python -m benchmarks.saving`: steps without a save, and with those of each variant."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.saving import AT_ONCE, NO_SAVE, VARIANTS, Options
from mpiddp.bench.figures import emit, turns
from mpiddp.bench.training import build, open_source, synthetic_job, synthetic_order
from mpiddp.runtime.job.session import current
from mpiddp.train.data import batches
from mpiddp.train.measure import StepTimer
from mpiddp.train.run import open_checkpoints
from mpiddp.train.train import backward, save
from mpiddp.world import World


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    with synthetic_job(World.from_env(), sys.argv[2:]) as job:
        coordinator, config, device = job.coordinator, job.config, job.device
        data = open_source(job)
        steps = synthetic_order(job, data, 1).steps(epoch=0)
        images = list(batches(data.train, steps, config, epoch=0))
        folder = tempfile.mkdtemp(dir=options.folder)
        root = Path(coordinator.all_gather_json(folder, timeout_s=60)[0])
        state = build(job, data)
        checkpoints = open_checkpoints(root, config, data.contents)
        checkpoints.resume()

        def wait_for_saves() -> None:
            current().wait_for_saves()
            dist.barrier()

        def block(variant: str, first: int) -> list[float]:
            """Run a block and return the seconds of each step."""
            dist.barrier()
            timer = StepTimer(device)
            timer.resume()
            for index in range(options.steps):
                backward(state, iter(images), config)
                state.optimizer.step()
                state.optimizer.zero_grad(set_to_none=True)
                if index == 0 and variant != NO_SAVE:
                    save(checkpoints, state, first + 1, config)
                    if variant == AT_ONCE:
                        wait_for_saves()
                timer.tick()
            return timer.read()

        step_s: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
        cpu_s: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        first = 0
        # The warm-up round allocates memory and momentum, and selects kernels.
        for number, variant in turns(VARIANTS, options.rounds, warmup=1):
            start = time.process_time()
            seconds = block(variant, first)
            wait_for_saves()
            if number > 0:
                step_s[variant].append(seconds)
                cpu_s[variant].append(time.process_time() - start)
            first += options.steps
        checkpoints.close()
        if job.is_rank_0:
            shutil.rmtree(root)
            emit({"step_s": step_s, "cpu_s": cpu_s})


if __name__ == "__main__":
    main()
