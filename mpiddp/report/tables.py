"""The facts of runs as tables: what ran, its failures, the time lost, settings."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mpiddp.report.html import details, items, letter, table
from mpiddp.report.read import UNKNOWN, Failure, Run, number
from mpiddp.text import counted, duration, listed, size_text

_MAX_ROWS = 20
_OF_GPUS = ("use", "memory", "memory_total", "temperature")


def facts(runs: Sequence[Run]) -> str:
    return table(_head(runs), _rows([_facts_of(run) for run in runs]))


def _facts_of(run: Run) -> dict[str, str]:
    """What ran, without what no file tells."""
    found = {
        "folder": str(run.path.absolute()),
        "state": run.state,
        "started": date(run.starts[0].begins) if run.starts else UNKNOWN,
        "duration": time_text(run.seconds),
        "starts": str(len(run.starts) or UNKNOWN),
        "ranks": _placement(run),
        "versions": run.starts[-1].versions if run.starts else UNKNOWN,
        "step": UNKNOWN if run.step is None else f"{run.step:,}",
        "test accuracy": run.shown("{:.2%}", "test_accuracy"),
        "loss": run.shown("{:.4g}", "train_loss", "loss"),
        "images/s": run.shown("{:,.0f}", "images_per_s"),
        "step time p50": run.shown("{:.4f} s", "step_time_p50_s"),
        "step time p95": run.shown("{:.4f} s", "step_time_p95_s"),
        "time of the steps": _time(run),
        "GPUs": _gpus(run.starts[-1].gpus if run.starts else ()),
        "saves kept": listed([f"{step:,}" for step in run.saves]) or UNKNOWN,
    }
    return {name: text for name, text in found.items() if text != UNKNOWN}


def _head(runs: Sequence[Run]) -> Sequence[str]:
    """A column for each of several runs."""
    return ("", *map(letter, range(len(runs)))) if len(runs) > 1 else ()


def _rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each name, with the value of each run."""
    names = dict.fromkeys(name for each in records for name in each)
    return [(name, *(str(each.get(name, UNKNOWN)) for each in records)) for name in names]


def failures(runs: Sequence[Run]) -> str:
    """Each sentence once, with the ranks that ended with it. The first to fail comes first."""
    sentences = []
    for index, run in enumerate(runs):
        alike: dict[str, list[Failure]] = defaultdict(list)
        found = [failure for start in run.starts for failure in start.failures]
        for failure in sorted(found, key=lambda each: each.is_consequence):
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
            lost = (time_text(repeated), time_text(idle), cause)
            rows.append((f"{_of(index, runs)}{date(start.begins)}", f"{start.step:,}", *lost))
    return table(("restart", "from step", "work repeated", "nothing ran", "after"), rows)


def time_text(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def settings(runs: Sequence[Run]) -> str:
    """All settings of one run, or of several those that differ, in a table that unfolds; "" without any."""
    given = [{name: each for name, each in run.config.items() if each is not None} for run in runs]
    rows = _rows(given)
    title = counted(len(rows), "setting")
    if len(runs) > 1:
        rows = [row for row in rows if len(set(row[1:])) > 1]
        title = f"different: {counted(len(rows), 'setting')}"
    return details(title, table(_head(runs), rows)) if rows else ""


def _placement(run: Run) -> str:
    """The ranks of the last start by host."""
    counts = Counter(run.starts[-1].hosts if run.starts else ())
    if not counts:
        return UNKNOWN
    names = listed([f"{host} {count}" for host, count in counts.items()])
    return f"{counts.total()} on {counted(len(counts), 'host')} ({names})"


def _time(run: Run) -> str:
    """What the steps of `mpiddp train`, and the pauses between them, have spent their time on."""
    recorded = run.summary.get("phases")
    phases = recorded if isinstance(recorded, dict) else {}
    spent = {name: number(phases, name) or 0.0 for name in phases}
    total = sum(each for each in spent.values() if each > 0)
    parts = [f"{name} {each / total:.0%}" for name, each in spent.items() if each > 0]
    return ", ".join(parts) or UNKNOWN


def _gpus(ranks: Sequence[dict[str, Any]]) -> str:
    """What the GPUs of the last start have done: their mean use, the most memory and heat of any."""
    values = {
        name: [n for each in ranks if (n := number(each, name)) is not None] for name in _OF_GPUS
    }
    use, memory, total, heat = values.values()
    parts = [f"{sum(use) / len(use):.0f} % in use"] if use else []
    parts += [f"at most {size_text(max(memory))}"] if memory else []
    parts += [f"of {size_text(max(total))}"] if total and memory else []
    parts += [f"up to {max(heat):.0f} °C"] if heat else []
    slow = [each["slowed"] for each in ranks if isinstance(each.get("slowed"), list)]
    parts += sorted({str(why) for reasons in slow for why in reasons})
    return ", ".join(parts) or UNKNOWN


def _of(index: int, runs: Sequence[Run]) -> str:
    """The letter of a run in front of a text, where there are several."""
    return f"{letter(index)}: " if len(runs) > 1 else ""
