"""The facts of runs as tables: what ran, its failures, the time lost, settings, environment."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mpiddp.report.html import by_run, details, items, letter, table
from mpiddp.report.read import UNKNOWN, Failure, Run, number
from mpiddp.text import counted, duration, listed, shares

_MAX_ROWS = 20


def facts(runs: Sequence[Run]) -> str:
    rows = {
        "folder": [str(run.path.absolute()) for run in runs],
        "command": [str(run.start_record.get("command", UNKNOWN)) for run in runs],
        "state": [run.state for run in runs],
        "started": [date(run.starts[0].begins) if run.starts else UNKNOWN for run in runs],
        "duration": [_duration(run.seconds) for run in runs],
        "starts": [str(len(run.starts) or UNKNOWN) for run in runs],
        "ranks": [_placement(run) for run in runs],
        "versions": [run.starts[-1].versions if run.starts else UNKNOWN for run in runs],
        "data set": [_named(run, "dataset") for run in runs],
        "model": [_named(run, "arch") for run in runs],
        "step": [UNKNOWN if run.step is None else f"{run.step:,}" for run in runs],
        "test accuracy": [run.shown("{:.2%}", "test_accuracy") for run in runs],
        "loss": [run.shown("{:.4g}", "train_loss", "loss") for run in runs],
        "images/s": [run.shown("{:,.0f}", "images_per_s") for run in runs],
        "step time p50": [run.shown("{:.4f} s", "step_time_p50_s") for run in runs],
        "step time p95": [run.shown("{:.4f} s", "step_time_p95_s") for run in runs],
        "time of the steps": [_time(run) for run in runs],
        "saves kept": [listed([f"{step:,}" for step in run.saves]) or UNKNOWN for run in runs],
    }
    return by_run({name: cells for name, cells in rows.items() if set(cells) != {UNKNOWN}})


def failures(runs: Sequence[Run]) -> str:
    """Each sentence once, with the ranks that ended with it. The first to fail comes first."""
    sentences = []
    for index, run in enumerate(runs):
        alike: dict[str, list[Failure]] = defaultdict(list)
        found = [failure for start in run.starts for failure in start.failures]
        for failure in sorted(found, key=lambda each: (each.is_consequence, each.at)):
            alike[failure.sentence].append(failure)
        for sentence, same in list(alike.items())[:_MAX_ROWS]:
            first, others = same[0], len({each.rank for each in same}) - 1
            also = f" and {counted(others, 'other')}" if others else ""
            why = " (another rank had ended before)" if first.is_consequence else ""
            who = f"rank {first.rank} on {first.host}{also}, {date(first.at)}"
            sentences.append(f"{_of(index, runs)}{who}: {sentence}{why}")
    return items(sentences)


def time_lost(runs: Sequence[Run]) -> str:
    """For each restart the work that it repeats, and the time in which nothing ran."""
    rows = []
    for index, run in enumerate(runs):
        restarts = list(pairwise(run.starts))
        for before, start in restarts[-_MAX_ROWS:]:
            saves = [at for at in run.saves.values() if before.begins <= at < start.begins]
            idle = repeated = None
            if before.ends is not None:
                idle = max(0.0, start.begins - before.ends)
                repeated = max(0.0, before.ends - saves[-1]) if saves else None
            cause = before.failure or before.outcome or "a rank ended without a word"
            lost = (_duration(repeated), _duration(idle), cause)
            rows.append((f"{_of(index, runs)}{date(start.begins)}", f"{start.step:,}", *lost))
    return table(("restart", "from step", "work repeated", "nothing ran", "after"), rows)


def date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def compared(what: str, records: Sequence[dict[str, Any]]) -> str:
    """All values of one run, or of several those that differ, in a table that unfolds; "" without any."""
    values = [*map(_flat, records)]
    names = dict.fromkeys(name for each in values for name in each)
    rows = {name: [str(each.get(name, UNKNOWN)) for each in values] for name in names}
    title = counted(len(rows), what)
    if len(values) > 1:
        rows = {name: cells for name, cells in rows.items() if len(set(cells)) > 1}
        title = f"different: {counted(len(rows), what)}"
    return details(title, by_run(rows)) if rows else ""


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """{"git commit": "1f3a"} for {"git": {"commit": "1f3a"}}."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{name} {inner}": each for inner, each in value.items()}
        elif value is not None:
            flat[name] = value
    return flat


def _placement(run: Run) -> str:
    """The ranks of the last start by host."""
    counts = Counter(run.starts[-1].hosts if run.starts else ())
    if not counts:
        return UNKNOWN
    names = listed([f"{host} {count}" for host, count in counts.items()])
    return f"{counts.total()} on {counted(len(counts), 'host')} ({names})"


def _named(run: Run, name: str) -> str:
    return str(run.summary.get(name, run.config.get(name, UNKNOWN)))


def _time(run: Run) -> str:
    """What the steps of `mpiddp train`, and the pauses between them, have spent their time on."""
    recorded = run.summary.get("phases")
    phases = recorded if isinstance(recorded, dict) else {}
    return shares({name: number(phases, name) or 0.0 for name in phases}) or UNKNOWN


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _of(index: int, runs: Sequence[Run]) -> str:
    """The letter of a run in front of a text, where there are several."""
    return f"{letter(index)}: " if len(runs) > 1 else ""
