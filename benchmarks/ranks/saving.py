"""A rank of `python -m benchmarks.saving`: steps without a save, and with those of each variant."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from mpiddp.train.measure import StepTimer, gathered
from mpiddp.train.run import open_checkpoints

from benchmarks.saving import AT_ONCE, NO_SAVE, VARIANTS, Options
from benchmarks.training import build, synthetic_job
from mpiddp.bench.figures import emit, turns
from mpiddp.runtime.job.session import current
from mpiddp.train.data import batches
from mpiddp.train.train import average_statistics, backward, save


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    with synthetic_job(sys.argv[2:], 1) as job:
        config, data = job.config, job.data
        images = list(batches(data.train, job.order.steps(epoch=0), config, epoch=0))
        root = Path(gathered(tempfile.mkdtemp(dir=options.folder))[0])
        state = build(job)
        checkpoints = open_checkpoints(root, config, data.contents)
        checkpoints.resume()

        def wait_for_saves() -> None:
            current().wait_for_saves()
            dist.barrier()

        def block(variant: str, first: int) -> list[float]:
            """Run a block and return the seconds of each step."""
            dist.barrier()
            timer = StepTimer(job.device)
            timer.resume()
            for index in range(options.steps):
                backward(state, iter(images), config)
                state.optimizer.step()
                average_statistics(state.model)
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
        if job.world.rank == 0:
            shutil.rmtree(root)
            emit({"step_s": step_s, "cpu_s": cpu_s})


if __name__ == "__main__":
    main()
