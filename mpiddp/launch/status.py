"""The state of a job: the status below its output on a terminal, and the facts for `mpiddp top`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpiddp.launch.ranks import Ranks
from mpiddp.text import counted, duration, escaped, size_text

# What people look at first, as a narrow terminal cuts the rest.
_FIRST = ("epoch", "train_loss", "loss", "test_accuracy", "accuracy", "lr")
_QUIET_STEPS, _QUIET_S = 10, 3.0  # without a step: a rank is quiet after the longer of these
_LONGEST_LINE = 200  # characters of a rank's last line


def status_lines(ranks: Ranks, attempt: int, straggler: str, now: float) -> list[str]:
    """The lines of the status; none before the first step. Times are of the caller's clock, in seconds.

    `straggler` is a sentence about the straggler, "" if there is none.
    """
    if not ranks.steps:
        return []
    return [_training(ranks), _machines(ranks, attempt, straggler, now)]


def _training(ranks: Ranks) -> str:
    step, shown = ranks.newest_step, dict(ranks.shown)
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
    for name in names:
        value = shown[name]
        parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return escaped("  ".join(parts))


def _machines(ranks: Ranks, attempt: int, straggler: str, now: float) -> str:
    hosts = len(set(ranks.hosts))
    parts = [f"{counted(ranks.world_size, 'rank')} on {counted(hosts, 'host')}"]
    if attempt > 1:
        parts.append(f"attempt {attempt}")
    parts.append(f"{size_text(max(pace.memory for pace in ranks.paces.values()))} a rank")
    if straggler:
        parts.append(straggler.partition(":")[0])
    if ranks.saving:
        parts.append("saving")
    elif ranks.last_saved_at:
        parts.append(f"saved {duration(now - ranks.last_saved_at)} ago")
    return escaped("  ".join(parts))


def job_facts(ranks: Ranks, latest: Mapping[int, bytes], now: float) -> dict[str, Any]:
    """The state of the job and of each rank. Times of a step are means in seconds; memory is in bytes.

    `latest` is the end of what each rank has written.
    """
    table = []
    for rank in range(ranks.world_size):
        table.append({**_rank_facts(ranks, rank, now), "line": _last_line(latest.get(rank, b""))})
    return {
        "ranks": table,
        "step": ranks.newest_step if ranks.steps else None,
        "rate": max((facts["rate"] for facts in table if "rate" in facts), default=None),
    }


def _rank_facts(ranks: Ranks, rank: int, now: float) -> dict[str, Any]:
    facts = {
        "rank": rank,
        "host": ranks.host_of(rank),
        "pid": ranks.started.get(rank, {}).get("pid"),
        "state": _state(ranks, rank),
    }
    if rank in ranks.steps:
        step, since = ranks.steps[rank]
        facts |= {"step": step, "ago_s": now - since, "memory": ranks.paces[rank].memory}
        if time_of_step := ranks.paces[rank].step_time:
            step_s, own_s, cpu_s = time_of_step
            if facts["state"] == "running" and now - since > max(_QUIET_STEPS * step_s, _QUIET_S):
                facts["state"], step_s = "quiet", now - since
            facts |= {"rate": 1 / step_s, "own_s": own_s, "wait_s": max(0.0, step_s - own_s)}
            facts["cores"] = cpu_s / step_s
    return facts


def _state(ranks: Ranks, rank: int) -> str:
    for state, members in (
        ("failed", ranks.failures),
        ("done", ranks.done),
        ("saving", ranks.saving),
        ("running", ranks.joining),
        ("joining", ranks.started),
    ):
        if rank in members:
            return state
    return "starting"


def _last_line(text: bytes) -> str:
    """The last line that is not empty, as a terminal shows it."""
    lines = text.decode(errors="replace").replace("\r", "\n").split("\n")
    return escaped(next((line for line in reversed(lines) if line.strip()), "")[-_LONGEST_LINE:])
