"""`mpiddp bench step`: the time of each part of a step on each rank, and the runner's overhead.

The runner's loop is that of `mpiddp train`, with its schedule, its records and its timer. The bare loop
is hand-written, with the same model, optimizer and DDP on the same tensors. It is measured twice; the
difference between the two is the noise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, parse_rank_options
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.bench.rounds import ratios
from mpiddp.errors import UserError
from mpiddp.text import counted
from mpiddp.train.options import parse as parse_training

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"
PHASES = ("data", "forward", "backward", "communication exposed", "optimizer", "other")
STEP = "step"  # the sum of the phases


@dataclass(frozen=True)
class Options:
    steps: int
    real_data: bool
    rounds: int


def rank_options(argv: list[str]) -> tuple[Options, list[str]]:
    return parse_rank_options("mpiddp bench-rank step", Options, _add_options, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    # A block of 50 steps contains one log line, as in a training.
    parser.add_argument("--steps", type=whole(4), default=50, metavar="K", help="steps per block")
    parser.add_argument(
        "--real-data",
        action="store_true",
        help="time the parts of a step with the data set instead of synthetic images",
    )
    add_rounds(parser, default=5)


def measure(options: Options, jobs: Jobs) -> Results:
    if parse_training(list(jobs.training)).grad_accum_steps != 1:
        raise UserError(
            "mpiddp bench step measures steps of one backward pass. Leave out --grad-accum-steps."
        )
    ranks, rounds = counted(jobs.slots, "rank"), counted(options.rounds, "round")
    note(f"step: {ranks}, {rounds} of 5 blocks of {options.steps} steps")
    [found] = jobs.run("step", *as_arguments(options), ranks=jobs.slots).results
    loops = found["loops"]
    return {
        "settings": found["settings"],
        "data": found["data"],
        "loops": [
            {
                "loop": name,
                "step_s": spread(seconds),
                "to_bare": spread(ratios(seconds, loops[BARE])),
                "rounds_s": seconds,
            }
            for name, seconds in loops.items()
        ],
        "ranks": [
            {
                "rank": rank,
                "host": found["hostnames"][rank],
                **{phase: spread(seconds) for phase, seconds in phases.items()},
            }
            for rank, phases in enumerate(found["phases"])
        ],
        "hosts": found["hosts"],
    }


def table(results: Results) -> str:
    head = ("rank", "host", *(f"{phase} ms" for phase in PHASES), "step ms")
    rows = [
        [
            str(rank["rank"]),
            rank["host"],
            *(f"{1000 * rank[phase]['median']:.2f}" for phase in PHASES),
            shown(rank[STEP], ".1f", 1000),
        ]
        for rank in results["ranks"]
    ]
    loops = [
        [each["loop"], shown(each["step_s"], ".1f", 1000), shown(each["to_bare"], ".3f")]
        for each in results["loops"]
    ]
    return (
        f"{_title(results)}; parts with {results['data']}\n\n{aligned(head, rows)}\n\n"
        f"{aligned(('loop', 'step ms', 'to the bare loop'), loops)}"
    )


def _title(results: Results) -> str:
    settings = results["settings"]
    return (
        f"A step of {settings['arch']} on {settings['dataset']}'s shape, {settings['batch_size']} "
        f"images per rank, amp {settings['amp']}, {settings['backend']}"
    )


def chart(results: Results) -> Chart:
    parts = {
        phase: spread([1000 * rank[phase]["median"] for rank in results["ranks"]])
        for phase in PHASES
    }
    loops = {each["loop"]: each["to_bare"] for each in results["loops"] if each["loop"] != BARE}
    panels = (
        Panel("ms of a step", "", {"median of the ranks, lowest to highest": parts}, "bars"),
        Panel(f"step time, of the {BARE}'s", "", {"median of the rounds": loops}, "points"),
    )
    return Chart(_title(results), panels)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    chart,
    size=(12, 4.8),
    takes_training=True,
    example="-H localhost:2 --arch resnet18 --stem imagenet",
)
