"""The state of a job: the status below its output on a terminal, and the facts for `mpiddp top`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    step, shown = ranks.newest_step, dict(ranks.shown)
    total = shown.pop("total", None)
    has_total = type(total) is int and total >= max(step, 1)
    training = [f"step {step:,}/{total:,} ({step / total:.0%})" if has_total else f"step {step:,}"]
    times = [time.step_s for pace in ranks.paces.values() if (time := pace.step_time)]
    if times:
        training.append(f"{1 / max(times):.3g} steps/s")
        if has_total and step < total:
            training.append(f"{duration((total - step) * max(times))} left")
    for name in sorted(shown, key=lambda name: [*_FIRST, name].index(name)):
        value = shown[name]
        training.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    hosts = counted(len(set(ranks.hosts)), "host")
    machines = [f"{counted(ranks.world_size, 'rank')} on {hosts}"]
    if attempt > 1:
        machines.append(f"attempt {attempt}")
    machines.append(f"{size_text(max(pace.memory for pace in ranks.paces.values()))} a rank")
    if straggler:
        machines.append(straggler.partition(":")[0])
    if ranks.saving:
        machines.append("saving")
    elif ranks.last_saved_at:
        machines.append(f"saved {duration(now - ranks.last_saved_at)} ago")
    return [escaped("  ".join(training)), escaped("  ".join(machines))]


def job_facts(ranks: Ranks, latest: Mapping[int, bytes], now: float) -> dict[str, Any]:
    """The state of the job and of each rank. Times of a step are means in seconds; memory is in bytes.

    `latest` is the end of what each rank has written.
    """
    table = [
        _rank_facts(ranks, rank, latest.get(rank, b""), now) for rank in range(ranks.world_size)
    ]
    return {
        "ranks": table,
        "step": ranks.newest_step if ranks.steps else None,
        "rate": max((facts["rate"] for facts in table if "rate" in facts), default=None),
    }


def _rank_facts(ranks: Ranks, rank: int, latest: bytes, now: float) -> dict[str, Any]:
    states: dict[str, Collection[int]] = {
        "failed": ranks.failures,
        "done": ranks.done,
        "saving": ranks.saving,
        "running": ranks.joining,
        "joining": ranks.started,
    }
    # Of the last line that is not empty, what a terminal shows.
    lines = latest.decode(errors="replace").replace("\r", "\n").split("\n")
    line = next((line for line in reversed(lines) if line.strip()), "")
    facts = {
        "rank": rank,
        "host": ranks.host_of(rank),
        "pid": ranks.started.get(rank, {}).get("pid"),
        "state": next((state for state, of in states.items() if rank in of), "starting"),
        "line": escaped(line[-_LONGEST_LINE:]),
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
