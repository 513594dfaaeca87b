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

from benchmarks.harness import ENV, option, ratios, run_job, run_script
from benchmarks.training import check_training, title
from mpiddp.arguments import whole
from mpiddp.bench.measured_jobs import Jobs, Result, aligned, spread
from mpiddp.errors import print_error
from mpiddp.text import counted

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"


@dataclass(frozen=True)
class Options:
    # A block of 50 steps contains one log line, as in a training.
    steps: int = option("steps per block", parse=whole(4), default=50)
    rounds: int = option("rounds; each loop runs once in each", parse=whole(1), default=5)


class Results(TypedDict):
    """Seconds of a step of each loop, in each round."""

    settings: Result
    step_s: dict[str, list[float]]


def measure(options: Options, jobs: Jobs, training: list[str]) -> Any:
    print_error(f"step: {counted(jobs.slots, 'rank')}")
    return run_job(jobs, "benchmarks.ranks.step", options, training)


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
    sys.exit(
        run_script("step", "the loop of mpiddp train beside a bare loop", check=check_training)
    )
