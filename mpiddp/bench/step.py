"""`mpiddp bench step`: the runner's loop beside a bare loop, and the phases of its steps.

The runner's loop is that of `mpiddp train`, with its schedule, its records and its timer. The bare loop
is hand-written, with the same model, optimizer and DDP on the same tensors. It is measured twice; the
difference between the two is the noise. The phases are those of the runner's own summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, option, ratios, shown, title, turns

if TYPE_CHECKING:
    from mpiddp.bench.training import Job
    from mpiddp.train.data import Batch

RUNNER, BARE, BARE_AGAIN = "runner", "bare loop", "bare loop again"


@dataclass(frozen=True)
class Options:
    # A block of 50 steps contains one log line, as in a training.
    steps: int = option("steps per block", type=whole(4), default=50)
    rounds: int = option("rounds; each loop runs once in each", type=whole(1), default=5)


class Results(TypedDict):
    """Seconds of a step, in each round: of each loop, and of the phases of the runner's."""

    settings: Result
    step_s: dict[str, list[float]]
    phases_s: dict[str, list[float]]
    hosts: list[Result]


def table(results: Results) -> str:
    settings, bare = results["settings"], results["step_s"][BARE]
    loops = [
        [name, shown(own, ".1f", 1000), shown(ratios(own, bare), ".3f")]
        for name, own in results["step_s"].items()
    ]
    phases = [[name, shown(own, ".2f", 1000)] for name, own in results["phases_s"].items()]
    return (
        f"A step of {title(settings)}, {settings['batch_size']} images per rank\n\n"
        f"{aligned(('loop', 'step ms', 'to the bare loop'), loops)}\n\n"
        f"{aligned(('phase of the runner, mean of the ranks', 'ms'), phases)}"
    )


# --- a rank ---


def rank(options: Options, training: list[str]) -> Result:
    """Blocks of both loops in turn on this rank, each with a fresh model: other work affects both equally."""
    from mpiddp.bench.training import synthetic_job, time_runner
    from mpiddp.train.data import batches
    from mpiddp.train.measure import PHASES, STARTUP_STEPS

    step_s: dict[str, list[float]] = {RUNNER: [], BARE: [], BARE_AGAIN: []}
    phases_s: dict[str, list[float]] = {phase: [] for phase in PHASES}
    count = STARTUP_STEPS + options.steps
    with synthetic_job([*training, "--grad-accum-steps", "1"], count) as job:
        tensors = list(batches(job.data.train, job.order.steps(epoch=0), job.config, epoch=0))
        for _, name in turns([*step_s], options.rounds):
            figures = time_runner(job) if name == RUNNER else _time_bare_loop(job, tensors)
            step_s[name].append(job.config.global_batch_size / figures["images_per_s"])
            for phase in PHASES if name == RUNNER else ():
                phases_s[phase].append(figures["phases"][phase] / count)
    return {"settings": job.settings, "step_s": step_s, "phases_s": phases_s}


def _time_bare_loop(job: Job, batches: list[Batch]) -> Result:
    """The figures of a hand-written loop with the same settings, measured as those of the runner.

    The learning rate is the same as well, because the speed of a CPU depends on the numbers that it
    computes with.
    """
    import torch.nn.functional as F

    from mpiddp.bench.training import build
    from mpiddp.train.measure import StepTimer, measured
    from mpiddp.train.train import autocast, learning_rate

    state = build(job)
    timer = StepTimer(job.device)
    timer.resume()
    for step, (images, labels) in enumerate(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step, job.order.steps_per_epoch, job.config)
        with autocast(job.config, images.device):
            loss = F.cross_entropy(state.ddp(images), labels)
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        timer.tick()
    return measured(timer, job.config.global_batch_size, job.device)
