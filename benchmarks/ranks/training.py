"""A rank of `python -m benchmarks.reference`: `training.py STEPS`, with options of mpiddp train."""

from __future__ import annotations

import sys

from benchmarks.training import synthetic_job, time_runner
from mpiddp.bench.measured_jobs import emit
from mpiddp.train.trainer import STARTUP_STEPS


def main() -> None:
    steps, *training = sys.argv[1:]
    with synthetic_job(training, STARTUP_STEPS + int(steps)) as job:
        figures = time_runner(job)
    if job.world.rank == 0:
        emit({**figures, "settings": job.settings})


if __name__ == "__main__":
    main()
