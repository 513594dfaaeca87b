"""The status of an attempt: the lines below the output on a terminal, and the facts for `mpiddp top`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from mpiddp.hosts.gpus import CHANGING
from mpiddp.launch.judge.events import Phase, Record
from mpiddp.launch.judge.gpu_use import find_idle
from mpiddp.text import counted, duration, escaped, size_text

# A narrow terminal cuts the other names.
_FIRST = ("epoch", "train_loss", "loss", "test_accuracy", "accuracy", "lr")
_LOSSES = ("loss", "train_loss")  # the names by which `mpiddp top` finds the loss
_QUIET_STEPS, _QUIET_S = 10, 3.0  # a rank without a step is quiet after the longer of these times
_LONGEST_LINE = 200  # characters of a rank's last line


def status_lines(record: Record, now: float, straggler: str = "") -> list[str]:
    """The lines of the status, with the sentence about a straggler. There are none before the first step."""
    if not record.made_steps:
        return []
    step, shown = record.newest_step, dict(record.shown)
    total = shown.pop("total", None)
    has_total = type(total) is int and total >= max(step, 1)
    training = [f"step {step:,}/{total:,} ({step / total:.0%})" if has_total else f"step {step:,}"]
    times = [time[0] for pace in record.paces.values() if (time := pace.step_time)]
    if times:
        training.append(f"{1 / max(times):.3g} steps/s")
        if has_total and step < total:
            training.append(f"{duration((total - step) * max(times))} left")
    for name in sorted(shown, key=lambda name: [*_FIRST, name].index(name)):
        value = shown[name]
        training.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    hosts = counted(len(set(record.hosts)), "host")
    machines = [f"{counted(record.world_size, 'rank')} on {hosts}"]
    if (attempt := record.fact("began", "attempt")) > 1:
        machines.append(f"attempt {attempt}")
    machines.append(f"{size_text(max(pace.memory for pace in record.paces.values()))} a rank")
    if straggler:
        machines.append(straggler.partition(":")[0])
    uses = [use for gpu in record.gpus.values() if (use := gpu.facts["use"]) is not None]
    if uses:
        machines.append(f"GPUs {sum(uses) / len(uses):.0f}% in use")
    if record.saving:
        machines.append("saving")
    elif record.last_saved_at:
        machines.append(f"saved {duration(now - record.last_saved_at)} ago")
    return [escaped("  ".join(training)), escaped("  ".join(machines))]


def job_facts(
    record: Record,
    latest: Mapping[int, bytes],
    now: float,
    straggler: str = "",
    silent: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """The state of the job and of each rank, in seconds and bytes. `latest` is the end of its output.

    `silent` has the ranks that do not answer now, with the seconds since they were heard of.
    """
    ranks = range(record.world_size)
    table = [_rank_facts(record, rank, latest.get(rank, b""), now) for rank in ranks]
    idle, others = find_idle(record.gpus, record.left if record.phase is Phase.RUNNING else [])
    they = "the GPU of {} idles" if len(idle) == 1 else "the GPUs of {} idle"
    return {
        "attempt": record.fact("began", "attempt"),
        "phase": "restarting" if record.phase is Phase.HELD else record.phase.name.lower(),
        "silent_hosts": _silent_hosts(record, silent or {}),
        "straggler": straggler,
        "idle_gpus": f"{they.format(record.names(idle))}{others}." if idle else "",
        "ranks": table,
        "step": record.newest_step if record.made_steps else None,
        "rate": max((facts["rate"] for facts in table if "rate" in facts), default=None),
        "loss": _loss_in(record.shown),
    }


def _silent_hosts(record: Record, silent: Mapping[int, float]) -> str:
    """A sentence about the hosts that do not answer now; "" if all do."""
    hosts = {record.host_of(rank): seconds for rank, seconds in silent.items()}
    clauses = [f"{host} has not answered for {silent_s:.0f} s" for host, silent_s in hosts.items()]
    return f"{', and '.join(clauses)}." if clauses else ""


def _loss_in(shown: Mapping[str, Any]) -> float | str | None:
    """The latest loss of rank 0. NaN and infinities are texts, because JSON has none."""
    loss = next((shown[name] for name in _LOSSES if name in shown), None)
    return str(loss) if isinstance(loss, float) and not math.isfinite(loss) else loss


def _rank_facts(record: Record, rank: int, latest: bytes, now: float) -> dict[str, Any]:
    states: dict[str, Collection[int]] = {
        "failed": record.failures,
        "done": record.done,
        "saving": record.saving,
        "running": record.latest["joining"],
        "joining": record.latest["started"],
    }
    # The last line that is not empty, as a terminal shows it.
    line = latest.decode(errors="replace").rstrip().replace("\r", "\n").rpartition("\n")[2]
    facts = {
        "rank": rank,
        "host": record.host_of(rank),
        "state": next((state for state, of in states.items() if rank in of), "starting"),
        "line": escaped(line[-_LONGEST_LINE:]),
    }
    joining = record.latest["joining"].get(rank)
    if joining is not None and "script" in joining.facts:
        facts["pid"] = joining.facts["script"]
    if gpu := record.gpus.get(rank):
        values = {name: gpu.facts[name] for name in CHANGING}
        facts |= {f"gpu_{name}": value for name, value in values.items() if value not in (None, "")}
    if pace := record.paces.get(rank):
        ago_s = now - pace.since
        facts |= {"step": pace.step, "ago_s": ago_s, "memory": pace.memory}
        if time_of_step := pace.step_time:
            step_s, own_s, cpu_s = time_of_step
            if facts["state"] == "running" and ago_s > max(_QUIET_STEPS * step_s, _QUIET_S):
                facts["state"], step_s = "quiet", ago_s
            facts |= {"rate": 1 / step_s, "own_s": own_s, "wait_s": max(0.0, step_s - own_s)}
            facts["cores"] = cpu_s / step_s
    return facts
