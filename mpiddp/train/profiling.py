"""`--profile 10:15`: torch.profiler over some steps, a sentence on where their time went, and a trace.

The trace is RUN/profile/rank_00000.json.gz, which https://ui.perfetto.dev opens. Communication is hidden
while the rank computes: on a GPU, NCCL's kernels beside others; on CPUs, gloo's beside torch's operators.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import UserError
from mpiddp.protocol.messages import is_shown
from mpiddp.runtime.log import log_of_every_rank
from mpiddp.text import counted
from mpiddp.train.config import TrainConfig
from mpiddp.train.option_parser import split_steps

_TOP = 5  # operators in the sentence
Interval = tuple[float, float]  # start and end, in microseconds


def check_profile(config: TrainConfig, total_steps: int, world_size: int) -> None:
    """Raise UserError if --profile names no step of the run, or --profile-ranks no rank of it."""
    assert config.profile is not None
    if split_steps(config.profile)[0] > total_steps:
        raise UserError(
            f"--profile {config.profile}: the training has {counted(total_steps, 'step')}. "
            "Name steps from 1 on."
        )
    if not any(is_shown(config.profile_ranks, rank, stream=1) for rank in range(world_size)):
        raise UserError(
            f"--profile-ranks {config.profile_ranks}: the job has {counted(world_size, 'rank')}. "
            "Name ranks from 0 on."
        )


class StepProfiler:
    """Records the chosen steps of this rank. Without --profile, or on another rank, it does nothing."""

    def __init__(self, config: TrainConfig, run: RunDir, rank: int) -> None:
        self._steps = range(0)
        if config.profile and is_shown(config.profile_ranks, rank, stream=1):
            first, last = split_steps(config.profile)
            self._steps = range(first, last + 1)
        self._trace = run.path / "profile" / f"rank_{rank:05d}.json.gz"
        self._rank = rank
        self._recorded: list[int] = []
        self._profile: Any = None  # torch's, while it records

    def before(self, step: int) -> None:
        """Record from here, if this is a chosen step."""
        if step in self._steps:
            self._recorded.append(step)
            if self._profile is None:
                os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its own stages
                from torch.profiler import profile  # few runs need it

                self._profile = profile()
                self._profile.start()

    def after(self, step: int) -> bool:
        """Whether the trace has been written, after the last chosen step. It takes seconds."""
        is_last = self._profile is not None and step == self._steps[-1]
        if is_last:
            self.close()
        return is_last

    def close(self) -> None:
        """Write the trace, unless there is nothing to write."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        log = log_of_every_rank()
        steps = f"steps {self._recorded[0]} to {self._recorded[-1]}"
        log.info(f"profile of rank {self._rank}, {steps}: {summarized(profile)}")
        try:
            self._trace.parent.mkdir(exist_ok=True)
            _export(profile, self._trace)
            log.info(f"trace, for https://ui.perfetto.dev: {self._trace}")
        except (OSError, RuntimeError) as error:
            log.warning(f"warning: --profile: {self._trace} cannot be written: {error}")


def _export(profile: Any, trace: Path) -> None:
    part = trace.with_name(f".part.{trace.name}")  # its ending makes torch compress it
    profile.export_chrome_trace(str(part))
    part.replace(trace)


def summarized(profile: Any) -> str:
    """The operators that took most of the time, and how much of the communication was hidden."""
    on_gpu = any(_is_kernel(event) for event in profile.events())
    rows = [row for row in profile.key_averages() if row.device_type.name == "CPU"]
    times = {
        row.key: row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in rows
    }
    total = sum(times.values())
    top = sorted(times, key=lambda name: times[name], reverse=True)[:_TOP]
    shares = ", ".join(f"{name} {times[name] / total:.0%}" for name in top if times[name])
    return f"{shares or 'no operators'}; {_hidden(profile.events(), on_gpu=on_gpu)}"


def _hidden(events: Sequence[Any], *, on_gpu: bool) -> str:
    communication, computation = [], []
    for event in events:
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith("gloo:") or (_is_kernel(event) and "nccl" in event.name.lower()):
            communication.append(interval)
        elif _is_kernel(event) if on_gpu else event.name.startswith("aten::"):
            computation.append(interval)
    spent = length(union(communication))
    if not spent:
        return "no communication"
    both = length(overlap(union(communication), union(computation)))
    return (
        f"{both / spent:.0%} of {spent / 1e6:.3f} s of communication was hidden behind computation"
    )


def _is_kernel(event: Any) -> bool:
    """Whether this ran on a GPU, and was neither a copy nor the range of a name."""
    is_other = event.is_user_annotation or event.name.startswith(("Memcpy", "Memset"))
    return event.device_type.name != "CPU" and not is_other


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The times in both of two unions."""
    found, index = [], 0
    for start, end in some:
        while index < len(others) and others[index][1] <= start:
            index += 1
        for other_start, other_end in others[index:]:
            if other_start >= end:
                break
            found.append((max(start, other_start), min(end, other_end)))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
