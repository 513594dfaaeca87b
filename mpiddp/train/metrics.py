"""The measurements of a run: step times on the device's own clock, and the final table."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.protocol.messages import PHASES
from mpiddp.text import align_columns, counted, percentile, shares

*_, OPTIMIZER = PHASES
PAUSES = ("evaluation", "save")
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
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.pauses: Counter[str] = Counter()

    def resume(self, pause: str = "") -> None:
        """Start the clock of the next step now. The pause since the last step was for this."""
        self._marks.append((pause, self._mark()))
        self.read()

    def phase_ends(self, phase: str) -> None:
        self._marks.append((phase, self._mark()))

    def tick(self) -> None:
        """The step ends."""
        self._marks.append((OPTIMIZER, self._mark()))

    def read(self) -> list[float]:
        """Return the seconds of all steps so far. On a GPU this waits for the last one."""
        if self._on_gpu and len(self._marks) > 1:
            self._marks[-1][1].synchronize()
        for (_, start), (phase, end) in pairwise(self._marks):
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            if phase not in PHASES:
                self.pauses[phase] += seconds
                continue
            self.phases[phase] += seconds
            self._step_s += seconds
            if phase == OPTIMIZER:
                self._seconds.append(self._step_s)
                self._step_s = 0.0
        del self._marks[:-1]
        return self._seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class Summary:
    """summary.json. Times are those of the slowest rank; accuracy is a fraction."""

    dataset: str
    arch: str
    num_parameters: int
    world_size: int
    num_nodes: int
    hosts: dict[str, int]  # ranks on each host
    global_batch_size: int
    epochs: int
    steps: int
    train_loss: float | None
    test_accuracy: float | None
    test_images: int | None
    images_per_s: float | None
    step_time_p50_s: float | None
    step_time_p95_s: float | None
    wall_s: float
    parallel: str = "ddp"
    # Seconds of all steps in each phase, and of each pause: the mean of all ranks.
    phases: dict[str, float] = field(default_factory=dict)


def read_summary(content: bytes) -> Summary | None:
    """The contents of a summary.json, whichever version wrote it. None if another program did."""
    try:
        found = json.loads(content)
        known = {each.name for each in fields(Summary)}
        summary = Summary(**{name: found[name] for name in found if name in known})
        table(summary, Path())  # fails on values of other types
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return summary


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Replace each time by that of the slowest rank. A collective: every rank must call it."""
    all_ranks = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(all_ranks, dist.ReduceOp.MAX)
    times: list[float] = all_ranks.tolist()
    return times


def mean_phases(timer: StepTimer, device: torch.device) -> dict[str, float]:
    """The mean seconds of each phase and pause over all ranks. A collective: every rank must call it."""
    own = [timer.phases[name] for name in PHASES] + [timer.pauses[name] for name in PAUSES]
    seconds = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(seconds)
    means = (seconds / dist.get_world_size()).tolist()
    return dict(zip((*PHASES, *PAUSES), means, strict=True))


@dataclass(frozen=True)
class Speed:
    """The speed of the steps on the slowest rank; None if no step ran."""

    images_per_s: float | None
    step_time_p50_s: float | None
    step_time_p95_s: float | None


def measure_speed(timer: StepTimer, images_of_steps: Sequence[int], device: torch.device) -> Speed:
    """Compute the speed of all steps but the first few. A collective: every rank must call it.

    Args:
        images_of_steps: the images of each timed step, over all ranks.
    """
    own = timer.read()
    if len(own) > 2 * STARTUP_STEPS:
        own = own[STARTUP_STEPS:]
    *step_times, total = slowest([*own, sum(own)], device)
    if not step_times:
        return Speed(None, None, None)
    images = sum(images_of_steps[-len(step_times) :])
    return Speed(images / total, percentile(step_times, 50), percentile(step_times, 95))


def table(summary: Summary, out: Path) -> str:
    """The table that a run prints at its end."""
    hosts = ", ".join(f"{name} {count}" for name, count in summary.hosts.items())
    rows = {
        "data set": summary.dataset,
        "arch": f"{summary.arch} ({summary.num_parameters:,} parameters)",
        "ranks": f"{summary.world_size} on {counted(summary.num_nodes, 'host')} ({hosts})",
        "steps": f"{summary.steps:,} of {summary.global_batch_size} images",
        "images/s": f"{_or_dash(summary.images_per_s, ',.0f')} over all ranks",
        "step time": f"p50 {_ms(summary.step_time_p50_s)}, p95 {_ms(summary.step_time_p95_s)}",
        "time": shares(summary.phases) or "-",
        "train loss": _or_dash(summary.train_loss, ".4f"),
        "test accuracy": "no test set"
        if summary.test_accuracy is None
        else f"{summary.test_accuracy:.2%} of {summary.test_images:,} images",
        "wall time": f"{summary.wall_s:.0f} s",
        "run folder": str(out),
    }
    return align_columns(list(rows.items()))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
