"""The measurements of a run: step times on the device's own clock, and the figures of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpiddp.train.config import Config

PHASES = ("data", "forward", "backward", "waiting", "optimizer")  # of a step
SPENT = (*PHASES, "evaluation", "save")  # with the pauses between steps
STARTUP_STEPS = 3  # slow because of page faults and kernel selection; left out of the figures


class StepTimer:
    """Times each step from the end of the previous one, without the pauses for other work, and its phases.

    On a GPU, the end of a phase is an event on its stream, so timing never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type != "cpu"
        self._marks: list[tuple[str, Any]] = []  # each phase or pause, and its end
        self._seconds: list[float] = []
        self._step_s = 0.0
        # Seconds since the beginning, when last read: of the steps in each phase, and of each pause.
        self.spent: dict[str, float] = defaultdict(float)

    def resume(self, pause: str = "") -> None:
        """Start the clock of the next step now. The pause since the last step was for this."""
        self.phase_ends(pause)
        self.read()

    def phase_ends(self, phase: str) -> None:
        if self._on_gpu:
            end: Any = torch.Event(self._device, enable_timing=True)
            end.record()
        else:
            end = time.perf_counter()
        self._marks.append((phase, end))

    def forget(self) -> None:
        """Leave out everything since the last `resume` or `read`."""
        self._marks.clear()

    def tick(self) -> None:
        """The step ends."""
        self.phase_ends("optimizer")

    def read(self) -> list[float]:
        """Return the seconds of all steps so far. On a GPU this waits for the last one."""
        if self._on_gpu and len(self._marks) > 1:
            self._marks[-1][1].synchronize()
        for (_, start), (phase, end) in pairwise(self._marks):
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            self.spent[phase] += seconds
            if phase in PHASES:
                self._step_s += seconds
            if phase == "optimizer":
                self._seconds.append(self._step_s)
                self._step_s = 0.0
        del self._marks[:-1]
        return self._seconds


@dataclass(frozen=True)
class Forecast:
    """How long the rest of a training takes."""

    config: Config
    steps_per_epoch: int
    pass_s: Mapping[int, float]  # of a step's passes, by the size of the images, from `time_passes`
    evaluation_s: float

    def left_s(self, step: int, evaluated: int, step_s: float | None = None) -> float:
        """The seconds from the end of `step` on, if the last evaluation was after the step `evaluated`.

        A step like the last one takes `step_s`; None for as long as its passes. Steps on images of another
        size differ from it by the time of their passes.
        """
        config, length = self.config, self.steps_per_epoch
        last_pass_s = self.pass_s[config.image_side(max(0, step - 1) // length)]
        besides_s = 0.0 if step_s is None else step_s - last_pass_s  # data, optimizer, other ranks
        left = 0.0
        for epoch in range(config.epochs):
            end = (epoch + 1) * length
            step_s_there = self.pass_s[config.image_side(epoch)] + besides_s
            left += min(length, max(0, end - step)) * step_s_there
            left += self.evaluation_s * (end > evaluated and is_evaluated(epoch, config))
        return max(0.0, left)


def is_evaluated(epoch: int, config: Config) -> bool:
    """Whether the model is scored after this epoch. It is not while it has trained on smaller images only."""
    return epoch >= config.low_res_epochs or epoch == config.epochs - 1


def duration(seconds: float) -> str:
    """ "40 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank: [world_size]. A collective: every rank must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Replace each time by that of the slowest rank. A collective: every rank must call it."""
    all_ranks = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(all_ranks, dist.ReduceOp.MAX)
    return list(all_ranks.tolist())


def measured(timer: StepTimer, global_batch_size: int, device: torch.device) -> dict[str, Any]:
    """The figures of the summary. A collective: every rank must call it.

    The speed is that of all steps but the first few, on the slowest rank. Phases and pauses are the mean.
    """
    own = timer.read()
    own = own[STARTUP_STEPS if len(own) > 2 * STARTUP_STEPS else 0 :]
    *times, total = slowest([*own, sum(own)], device)
    # Without a time, the run has resumed after its last step.
    middle, high = np.percentile(times, (50, 95)).tolist() if times else (None, None)
    of_ranks = gathered(dict(timer.spent))
    return {
        "images_per_s": len(times) * global_batch_size / total if times else None,
        "step_time_p50_s": middle,
        "step_time_p95_s": high,
        "phases": {phase: mean(each.get(phase, 0.0) for each in of_ranks) for phase in SPENT},
    }
