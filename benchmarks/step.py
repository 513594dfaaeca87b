"""The loop of `mpiddp train` beside a bare loop.

    python -m benchmarks.step -H localhost:2 --arch resnet18 --stem imagenet

The runner's loop is that of `mpiddp train`, with its schedule and its records. The bare loop is hand-written,
with the same model, optimizer and DDP on the same tensors. It is measured twice; the difference between the
two is the noise.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, TypedDict

from benchmarks.harness import ENV
from benchmarks.training import check_training, title
from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, option, ratios, spread
from mpiddp.bench.main import Row, run_benchmark
from mpiddp.bench.measured_jobs import Jobs
from mpiddp.errors import print_error
from mpiddp.text import counted

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"


@dataclass(frozen=True)
class Options:
    # A block of 50 steps contains one log line, as in a training.
    steps: int = option("steps per block", type=whole(4), default=50)
    rounds: int = option("rounds; each loop runs once in each", type=whole(1), default=5)


class Results(TypedDict):
    """Seconds of a step of each loop, in each round."""

    settings: Result
    step_s: dict[str, list[float]]


def measure(options: Options, jobs: Jobs) -> Any:
    print_error(f"step: {counted(jobs.slots, 'rank')}")
    return jobs.run_job("-m", "benchmarks.ranks.step", options=options, ranks=jobs.slots)


def table(results: Results) -> str:
    settings, bare = results["settings"], results["step_s"][BARE]
    loops = [
        [name, spread([1000 * s for s in seconds], ".1f"), spread(ratios(seconds, bare), ".3f")]
        for name, seconds in results["step_s"].items()
    ]
    return (
        f"A step of {title(settings)}, {settings['batch_size']} images per rank\n\n"
        f"{aligned(('loop', 'step ms', 'to the bare loop'), loops)}"
    )


if __name__ == "__main__":
    os.environ.update(ENV)
    row = Row("the loop of mpiddp train beside a bare loop", check=check_training)
    module = sys.modules[__name__]
    sys.exit(run_benchmark("python -m benchmarks.step", "step", row, module, sys.argv[1:]))
