"""`mpiddp bench step`: the runner's loop beside a bare loop, and the phases of its steps.

The runner's loop is that of `mpiddp train`, with its schedule, its records and its timer. The bare loop
is hand-written, with the same model, optimizer and DDP on the same tensors. It is measured twice; the
difference between the two is the noise. The phases are those of the runner's own summary.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import PATIENCE_S, Result, Spread, aligned, ratios, shown, spread, turns
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import option
from mpiddp.text import counted

if TYPE_CHECKING:
    from mpiddp.bench.training import Job
    from mpiddp.train.data import Batch, Data
    from mpiddp.train.order import Order
    from mpiddp.world import World

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"


@dataclass(frozen=True)
class Options:
    # A block of 50 steps contains one log line, as in a training.
    steps: int = option("steps per block", type=whole(4), default=50)
    rounds: int = option("rounds; each loop runs once in each", type=whole(1), default=5)


class Loop(TypedDict):
    """The step times of one loop, and their ratio to those of the bare loop in the same round."""

    loop: str
    step_s: Spread
    to_bare: Spread
    rounds_s: list[float]


class Results(TypedDict):
    settings: Result
    loops: list[Loop]
    phases: dict[str, Spread]  # seconds
    hosts: list[Result]


def measure(options: Options, jobs: Jobs) -> Results:
    ranks, rounds = counted(jobs.slots, "rank"), counted(options.rounds, "round")
    note(f"step: {ranks}, {rounds} of 3 blocks of {options.steps} steps")
    found: Results = jobs.run("step", options, ranks=jobs.slots)
    return found


def table(results: Results) -> str:
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


# --- a rank ---


def rank(world: World, options: Options, training: list[str]) -> Results:
    """Blocks of both loops in turn on this rank, each with a fresh model: other work affects both equally."""
    from mpiddp.bench.training import open_source, settings, synthetic_job, synthetic_order
    from mpiddp.train.data import batches
    from mpiddp.train.measure import PHASES, STARTUP_STEPS

    count = STARTUP_STEPS + options.steps
    with synthetic_job(world, [*training, "--grad-accum-steps", "1"]) as job:
        data = open_source(job)
        order = synthetic_order(job, data, count)
        tensors = list(batches(data.train, order.steps(epoch=0), job.config, epoch=0))
        summaries: list[dict[str, Any]] = []
        with _scratch_folder(job) as folder:
            blocks: dict[str, Callable[[Path], float]] = {
                RUNNER: lambda out: _time_runner(job, data, order, out, summaries),
                BARE: lambda _: _time_bare_loop(job, data, tensors, order),
                BARE_AGAIN: lambda _: _time_bare_loop(job, data, tensors, order),
            }
            seconds: dict[str, list[float]] = {name: [] for name in blocks}
            for number, name in turns(list(blocks), options.rounds):
                seconds[name].append(blocks[name](folder / str(number)))
    loops: list[Loop] = [
        {
            "loop": name,
            "step_s": spread(own),
            "to_bare": spread(ratios(own, seconds[BARE])),
            "rounds_s": own,
        }
        for name, own in seconds.items()
    ]
    phases = {
        name: spread([each["phases"][name] / each["steps"] for each in summaries])
        for name in PHASES
    }
    return {"settings": settings(job), "loops": loops, "phases": phases, "hosts": job.hosts}


def _time_runner(
    job: Job, data: Data, order: Order, out: Path, summaries: list[dict[str, Any]]
) -> float:
    """The seconds of a step as `mpiddp train` itself measures them."""
    from mpiddp.bench.training import build
    from mpiddp.train.records import Records
    from mpiddp.train.run import open_checkpoints
    from mpiddp.train.train import fit

    config = replace(job.config, epochs=1, out=str(out))
    state = build(job, data)
    with open_checkpoints(out, config, data.contents) as checkpoints:
        checkpoints.resume()
        world = job.coordinator.world
        records = Records(config, world, data, state, order.steps_per_epoch)
        fit(config, data, order, state, checkpoints, step=0, hooks=[records])
    summary = records.summary
    summaries.append(summary)
    return float(summary["global_batch_size"] / summary["images_per_s"])


def _time_bare_loop(job: Job, data: Data, batches: list[Batch], order: Order) -> float:
    """The seconds of a step in a hand-written loop with the same settings.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    from mpiddp.bench.training import bare_step, build
    from mpiddp.train.measure import STARTUP_STEPS, StepTimer, slowest
    from mpiddp.train.train import learning_rate

    state = build(job, data)
    timer = StepTimer(job.device)
    timer.resume()
    for step, (images, labels) in enumerate(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step, order.steps_per_epoch, job.config)
        bare_step(state, job.config, images, labels)
        timer.tick()
    return mean(slowest(timer.read(), job.device)[STARTUP_STEPS:])


@contextlib.contextmanager
def _scratch_folder(job: Job) -> Iterator[Path]:
    """A temporary folder on rank 0's host for the records and checkpoints of the runner's loop."""
    own = tempfile.mkdtemp(prefix="mpiddp-bench-") if job.is_rank_0 else ""
    path = Path(job.coordinator.all_gather_json(own, timeout_s=PATIENCE_S)[0])
    try:
        yield path
    finally:
        if job.is_rank_0:
            shutil.rmtree(path)
