"""`mpiddp bench step`: the time of each part of a step on each rank, and the runner's overhead.

The runner's loop is that of `mpiddp train`, with its schedule, its records and its timer. The bare loop
is hand-written, with the same model, optimizer and DDP on the same tensors. It is measured twice; the
difference between the two is the noise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.arguments import whole
from mpiddp.bench import charts
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import add_rounds, as_arguments, parse_rank_options
from mpiddp.bench.report import aligned, shown, spread
from mpiddp.bench.rounds import ratios
from mpiddp.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"
PHASES = ("data", "forward", "backward", "communication exposed", "optimizer", "other")
STEP = "step"  # the sum of the phases
MAX_BARS = 16  # ranks in the chart


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


def draw(results: Results, figure: Figure) -> None:
    parts, loops = charts.axes(figure, columns=2)
    _draw_parts(parts, results["ranks"][:MAX_BARS])
    others = [each for each in results["loops"] if each["loop"] != BARE]
    bare_s = next(each["rounds_s"] for each in results["loops"] if each["loop"] == BARE)
    for index, (each, colour) in enumerate(zip(others, (charts.BLUE, charts.GREY), strict=True)):
        each_round = ratios(each["rounds_s"], bare_s)
        loops.plot([index] * len(each_round), each_round, "o", color=colour, alpha=0.5)
        middle = each["to_bare"]["median"]
        loops.plot([index - 0.25, index + 0.25], [middle, middle], color=colour, linewidth=2)
        loops.annotate(f"{middle:.3f}", (index + 0.28, middle), va="center")
    loops.axhline(1, color="#222222", linewidth=0.8)
    loops.set_xticks(range(len(others)), [f"{each['loop']} / {BARE}" for each in others])
    loops.set_xlim(-0.6, len(others) - 0.2)
    loops.set_ylabel("ratio of step times: each round, and the median")
    figure.suptitle(_title(results), fontsize=10)


def _draw_parts(on: Axes, ranks: list[Results]) -> None:
    names = [f"rank {rank['rank']}" for rank in ranks]
    left = [0.0] * len(ranks)
    colours = (
        charts.SKY,
        charts.BLUE,
        charts.GREEN,
        charts.ORANGE,
        charts.PURPLE,
        charts.GREY,
    )
    for phase, colour in zip(PHASES, colours, strict=True):
        # Noise can make a part negative; such a part is not drawn.
        widths = [max(0.0, 1000 * rank[phase]["median"]) for rank in ranks]
        on.barh(names, widths, 0.6, left=left, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    steps = [rank[STEP] for rank in ranks]
    low, high = charts.whiskers(steps)
    middles = [1000 * step["median"] for step in steps]
    spreads = [[1000 * each for each in side] for side in (low, high)]
    on.errorbar(middles, names, xerr=spreads, **charts.WHISKER)
    on.grid(axis="y", visible=False)
    on.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    on.invert_yaxis()
    on.set_xlabel("ms of a step (the line: lowest to highest of the rounds)")
    on.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)


BENCHMARK = Benchmark(
    Options,
    _add_options,
    measure,
    table,
    draw,
    size=(12, 4.8),
    takes_training=True,
    example="-H localhost:2 --arch resnet18 --stem imagenet",
)
