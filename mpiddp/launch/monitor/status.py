"""The status of a job below its output on a terminal: how far it is, how fast, and who is slowest."""

from __future__ import annotations

from typing import Any

from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.text import counted, duration, escaped, size_text

# What people look at first, as a narrow terminal cuts the rest.
_FIRST = ("epoch", "train_loss", "loss", "test_accuracy", "accuracy", "lr")


def status_lines(ranks: Ranks, attempt: int, holder: str, now: float) -> list[str]:
    """The lines of the status; none before the first step. Times are of the caller's clock, in seconds.

    Args:
        holder: a sentence about who holds the others up; "" if nobody does.
    """
    if not ranks.steps:
        return []
    return [_training(ranks), _machines(ranks, attempt, holder, now)]


def _training(ranks: Ranks) -> str:
    step = max(step for step, _ in ranks.steps.values())
    shown = dict(ranks.shown)
    total = shown.pop("total", None)
    has_total = type(total) is int and total >= max(step, 1)
    parts = [f"step {step:,}/{total:,} ({step / total:.0%})" if has_total else f"step {step:,}"]
    times = [time.step_s for pace in ranks.paces.values() if (time := pace.step_time)]
    if times:
        step_s = max(times)
        parts.append(f"{1 / step_s:.3g} steps/s")
        if has_total and step < total:
            parts.append(f"{duration((total - step) * step_s)} left")
    names = sorted(shown, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    parts += [f"{name} {_value(shown[name])}" for name in names]
    return escaped("  ".join(parts))


def _machines(ranks: Ranks, attempt: int, holder: str, now: float) -> str:
    hosts = len(set(ranks.hosts))
    parts = [f"{counted(ranks.world_size, 'rank')} on {counted(hosts, 'host')}"]
    if attempt > 1:
        parts.append(f"attempt {attempt}")
    parts.append(f"{size_text(max(pace.memory for pace in ranks.paces.values()))} a rank")
    if holder:
        parts.append(holder.partition(":")[0])
    if ranks.saving:
        parts.append("saving")
    elif ranks.last_saved_at:
        parts.append(f"saved {duration(now - ranks.last_saved_at)} ago")
    return escaped("  ".join(parts))


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
