"""The facts of runs as tables: what ran, its failures, the time lost, hosts, settings."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import mean, median

from mpiddp.report.history import nearest_first
from mpiddp.report.html import by_run, details, items, letter, table
from mpiddp.report.rank_files import Failure
from mpiddp.report.read import UNKNOWN, Run, number
from mpiddp.text import counted, duration, listed, shares

_MAX_ROWS = 20


def facts(runs: Sequence[Run]) -> str:
    rows = {
        "folder": [str(run.path.absolute()) for run in runs],
        "state": [run.state for run in runs],
        "started": [date(run.starts[0].begins) if run.starts else UNKNOWN for run in runs],
        "duration": [_duration(run.seconds) for run in runs],
        "starts": [str(len(run.starts) or UNKNOWN) for run in runs],
        "ranks": [_placement(run) for run in runs],
        "versions": [_versions(run) for run in runs],
        "data set": [_named(run, "dataset") for run in runs],
        "model": [_named(run, "arch") for run in runs],
        "step": [UNKNOWN if run.step is None else f"{run.step:,}" for run in runs],
        "test accuracy": [run.shown("{:.2%}", "test_accuracy") for run in runs],
        "train loss": [run.shown("{:.4f}", "train_loss", "loss") for run in runs],
        "images/s": [run.shown("{:,.0f}", "images_per_s") for run in runs],
        "step time p50": [run.shown("{:.4f} s", "step_time_p50_s") for run in runs],
        "step time p95": [run.shown("{:.4f} s", "step_time_p95_s") for run in runs],
        "time of the steps": [_time(run) for run in runs],
        "saves kept": [listed([f"{s.step:,}" for s in run.saves]) or UNKNOWN for run in runs],
    }
    return by_run({name: cells for name, cells in rows.items() if set(cells) != {UNKNOWN}})


def failures(runs: Sequence[Run]) -> str:
    """Each sentence once, with the ranks that ended with it. The first to fail comes first."""
    sentences = []
    for index, run in enumerate(runs):
        of_sentence: dict[str, list[Failure]] = defaultdict(list)
        for failure in sorted(
            (each for rank in run.ranks for each in rank.failures), key=nearest_first
        ):
            of_sentence[failure.sentence].append(failure)
        for sentence, found in list(of_sentence.items())[:_MAX_ROWS]:
            first, others = found[0], len({each.rank for each in found}) - 1
            who = f"rank {first.rank}{f' on {first.host}' if first.host else ''}"
            also = f" and {counted(others, 'other')}" if others else ""
            when = "" if first.at is None else f", {date(first.at)}"
            why = " (another rank had ended before)" if first.is_consequence else ""
            sentences.append(f"{_of(index, runs)}{who}{also}{when}: {sentence}{why}")
        if len(of_sentence) > _MAX_ROWS:
            sentences.append(f"{_of(index, runs)}{len(of_sentence) - _MAX_ROWS} more sentences")
    return items(sentences)


def time_lost(runs: Sequence[Run]) -> str:
    rows = []
    for index, run in enumerate(runs):
        name, restarts = _of(index, runs), run.starts[1:]
        for each in restarts[-_MAX_ROWS:]:
            step = UNKNOWN if each.step is None else f"{each.step:,}"
            lost = (_duration(each.repeated_s), _duration(each.idle_s))
            rows.append((f"{name}{date(each.begins)}", step, *lost, each.cause or ""))
        if len(restarts) > 1:
            repeated = sum(each.repeated_s or 0.0 for each in restarts)
            idle = sum(each.idle_s or 0.0 for each in restarts)
            what = f"{name}all {len(restarts)}"
            rows.append((what, "", _duration(repeated), _duration(idle), ""))
    return table(("restart", "from step", "work repeated", "nothing ran", "after"), rows)


def hosts(runs: Sequence[Run]) -> str:
    """The slowest hosts first: their ranks' mean step time, and how far it lies above the median rank's."""
    rows = []
    for index, run in enumerate(runs):
        of_host: dict[str, list[float]] = defaultdict(list)
        for rank in run.ranks:
            if rank.step_times_s:
                of_host[rank.host or "?"].append(mean(rank.step_times_s))
        middle = median([0.0, *(each for means in of_host.values() for each in means)][1:] or [1.0])
        slowest = sorted(of_host.items(), key=lambda item: max(item[1]), reverse=True)
        for host, means in slowest[:_MAX_ROWS]:
            excess = 100 * (max(means) / (middle or 1.0) - 1)
            times = (f"{mean(means):.4f} s", f"{excess:+.1f} %")
            rows.append((f"{_of(index, runs)}{host}", str(len(means)), *times))
    head = ("host", "ranks", "mean step time", "slowest rank beside the median")
    return table(head, rows) or (
        "<p>No rank recorded its step times: <code>mpiddp train --per-rank-log</code> does.</p>"
    )


def settings(runs: Sequence[Run]) -> str:
    """The settings of one run, or of several those that differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = {name: [str(run.config.get(name, UNKNOWN)) for run in runs] for name in names}
    if len(runs) == 1:
        what = counted(len(rows), "setting")
        return details(what, by_run(rows)) if rows else ""
    differ = {name: cells for name, cells in rows.items() if len(set(cells)) > 1}
    return by_run(differ) or ("<p>None.</p>" if names else "")


def date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _placement(run: Run) -> str:
    """The ranks of the last start by host, or those of the summary."""
    num_ranks = max(
        (rank.attempts[-1].num_ranks for rank in run.ranks[:1] if rank.attempts), default=0
    )
    counts = Counter(rank.host for rank in run.ranks if rank.host and rank.rank < num_ranks)
    found = {} if counts else run.summary.get("hosts")
    if isinstance(found, dict):
        counts.update({host: count for host, count in found.items() if isinstance(count, int)})
    if not counts:
        return UNKNOWN
    names = listed([f"{host} {count}" for host, count in counts.items()])
    return f"{counts.total()} on {counted(len(counts), 'host')} ({names})"


def _versions(run: Run) -> str:
    found = {rank.attempts[-1].versions for rank in run.ranks if rank.attempts}
    return listed(sorted(found)) or UNKNOWN


def _named(run: Run, name: str) -> str:
    return str(run.summary.get(name, run.config.get(name, UNKNOWN)))


def _time(run: Run) -> str:
    """What the steps of `mpiddp train`, and the pauses between them, have spent their time on."""
    told = run.summary.get("phases")
    parts = {name: number(told, name) or 0.0 for name in told} if isinstance(told, dict) else {}
    return shares(parts) or UNKNOWN


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _of(index: int, runs: Sequence[Run]) -> str:
    """The letter of a run in front of a text, where there are several."""
    return f"{letter(index)}: " if len(runs) > 1 else ""
