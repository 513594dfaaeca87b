"""`mpiddp bench step`: the runner's loop beside a bare loop, and the phases of its steps.

The runner's loop is that of `mpiddp train`, with its schedule, its records and its timer. The bare loop
is hand-written, with the same model, optimizer and DDP on the same tensors. It is measured twice; the
difference between the two is the noise. The phases are those of the runner's own summary.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, ratios, shown, spread
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import option
from mpiddp.text import counted

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"


@dataclass(frozen=True)
class Options:
    # A block of 50 steps contains one log line, as in a training.
    steps: int = option("steps per block", type=whole(4), default=50)
    rounds: int = option("rounds; each loop runs once in each", type=whole(1), default=5)


def measure(options: Options, jobs: Jobs) -> Result:
    ranks, rounds = counted(jobs.slots, "rank"), counted(options.rounds, "round")
    note(f"step: {ranks}, {rounds} of 3 blocks of {options.steps} steps")
    found = jobs.run("step", options, ranks=jobs.slots)
    loops, phases = found["loops"], found["phases"]
    return {
        "settings": found["settings"],
        "loops": [
            {
                "loop": name,
                "step_s": spread(seconds),
                "to_bare": spread(ratios(seconds, loops[BARE])),
                "rounds_s": seconds,
            }
            for name, seconds in loops.items()
        ],
        "phases": {name: spread([each[name] for each in phases]) for name in phases[0]},
        "hosts": found["hosts"],
    }


def table(results: Result) -> str:
    settings = results["settings"]
    loops = [
        [each["loop"], shown(each["step_s"], ".1f", 1000), shown(each["to_bare"], ".3f")]
        for each in results["loops"]
    ]
    phases = [[name, shown(each, ".2f", 1000)] for name, each in results["phases"].items()]
    return (
        f"A step of {settings['arch']} on synthetic {settings['dataset']}, "
        f"{settings['batch_size']} images per rank, amp {settings['amp']}, {settings['backend']}\n\n"
        f"{aligned(('loop', 'step ms', 'to the bare loop'), loops)}\n\n"
        f"{aligned(('phase of the runner, mean of the ranks', 'ms'), phases)}"
    )
