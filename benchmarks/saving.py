"""Measure the time that saves add to the steps, and print the table of docs/evidence/performance.md.

    python -m benchmarks.saving -H localhost:2 --rounds 12 --arch resnet18 --stem imagenet

Blocks of steps alternate in one job: without a save; with a save in a thread after the first step; and with
a save that completes before the next step. The checkpoints are written into a new folder in --folder. A step
is timed until the next one begins, so it includes the snapshot. The last step of a block does not wait for
the writing thread. `benchmarks.ranks.saving` runs in the ranks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.harness import ENV, markdown, option, ratios, run_job, run_script
from benchmarks.training import check_training
from mpiddp.arguments import whole
from mpiddp.bench.measured_jobs import Jobs, Result
from mpiddp.errors import print_error
from mpiddp.text import counted

NO_SAVE, THREAD, AT_ONCE = "no save", "in a thread", "at once"
VARIANTS = (NO_SAVE, THREAD, AT_ONCE)


@dataclass(frozen=True)
class Options:
    rounds: int = option("rounds of all variants", parse=whole(1), default=5)
    steps: int = option("steps of a block, and so of a save", parse=whole(2), default=20)
    folder: str | None = option("folder of the checkpoints (default: a temporary one)", value="DIR")


def measure(options: Options, jobs: Jobs, training: list[str]) -> Result:
    print_error(f"saving: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')}")
    results: Result = run_job(jobs, "benchmarks.ranks.saving", options, training)
    return results


def table(results: Result) -> str:
    """Medians over the rounds; a ratio is relative to the block without a save in the same round."""
    seconds: dict[str, list[list[float]]] = results["step_s"]
    plain_means = [mean(block) for block in seconds[NO_SAVE]]
    plain_medians = [median(block) for block in seconds[NO_SAVE]]
    rows = []
    for variant, blocks in seconds.items():
        means = [mean(block) for block in blocks]
        saving = [block[0] for block in blocks]
        rows.append(
            [
                variant,
                f"{median(means) * 1e3:.0f}",
                f"{median(ratios(means, plain_means)):.3f}",
                f"{median(saving) * 1e3:.0f}",
                f"{median(ratios(saving, plain_medians)):.2f}",
                f"{median(results['cpu_s'][variant]):.2f}",
            ]
        )
    times = ("mean step ms", "ratio", "step that saves ms", "ratio")
    return markdown(("variant", *times, "CPU s a block, rank 0"), rows)


if __name__ == "__main__":
    os.environ.update(ENV)
    sys.exit(run_script("saving", "the cost of a save", check=check_training))
