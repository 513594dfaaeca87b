"""A rank of `python -m benchmarks.saving`: steps without a save, and with each kind of save."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.harness import turns
from benchmarks.saving import AT_ONCE, NO_SAVE, VARIANTS, Options
from benchmarks.training import Clock, build, synthetic_job
from mpiddp.bench.measured_jobs import emit
from mpiddp.runtime.job.session import current
from mpiddp.train.main import open_checkpoints
from mpiddp.train.parallel import gathered


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    num_steps = (1 + options.rounds) * len(VARIANTS) * options.steps
    with synthetic_job(sys.argv[2:], num_steps) as job:
        root = Path(gathered(tempfile.mkdtemp(dir=options.folder))[0])
        training = build(job, root)
        training.begin(0)
        steps = training.steps(0)
        checkpoints = open_checkpoints(training)
        checkpoints.resume()

        def wait_for_saves() -> None:
            current().progress.wait_for_saves()
            dist.barrier()

        def block(variant: str, first: int) -> list[float]:
            """Run a block and return the seconds of each step."""
            dist.barrier()
            clock = Clock(job.device)
            for index in range(options.steps):
                next(steps)
                if index == 0 and variant != NO_SAVE:
                    training.save(checkpoints, first + 1)
                    if variant == AT_ONCE:
                        wait_for_saves()
                clock.step_ends(waits=True)
            return clock.seconds()

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
