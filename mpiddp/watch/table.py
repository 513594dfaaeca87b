"""The tables of `mpiddp ps` and `mpiddp top`, from what launchers say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpiddp.text import align_columns, counted, duration, escaped, size_text

Facts = Mapping[str, Any]


def _text(value: object) -> str:
    return escaped(str(value))


def _rate(value: float) -> str:
    return f"{value:.3g}/s"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _percent(value: float) -> str:
    return f"{value:.0%}"


# The columns of `top`: the fact of a rank, its text, and whether a sorted table begins with the largest.
COLUMNS: dict[str, tuple[str, Callable[[Any], str], bool]] = {
    "rank": ("rank", _text, False),
    "host": ("host", _text, False),
    "state": ("state", _text, False),
    "step": ("step", _text, False),
    "rate": ("rate", _rate, False),
    "own": ("own_s", _seconds, True),
    "wait": ("wait_s", _seconds, True),
    "cpu": ("cores", _percent, True),
    "memory": ("memory", size_text, True),
    "ago": ("ago_s", duration, True),
}
# In this order, as a terminal is too narrow for all.
_LEAST_IMPORTANT = ("memory", "own", "wait", "cpu", "ago", "host", "rate")
_LEAST_LINE = 10  # characters of a rank's last line
_MARK = "\x00"


def jobs_table(jobs: Sequence[tuple[int, Facts]]) -> str:
    """The table of `mpiddp ps`: a line for each job's pid and facts, {} for one that does not answer."""
    rows = [("PID", "NAME", "HOSTS", "RANKS", "STEP", "RATE", "STATE", "AGE")]
    for pid, facts in jobs:
        hosts = hosts_of(facts) if facts else []
        more = f" +{len(hosts) - 2}" if len(hosts) > 2 else ""
        row = (
            str(pid) if pid else "-",
            _cell(facts.get("name"), _text),
            escaped(",".join(hosts[:2]) + more) or "-",
            str(len(facts["ranks"])) if facts else "-",
            _cell(facts.get("step"), _text),
            _cell(facts.get("rate"), _rate),
            _text(facts.get("phase", "no answer")),
            _cell(facts.get("age_s"), duration),
        )
        rows.append(row)
    return align_columns(rows, right=(0, 3, 4, 5))


def hosts_of(facts: Facts) -> list[str]:
    """The hosts of a job, in the order of their ranks."""
    return list(dict.fromkeys(str(rank["host"]) for rank in facts["ranks"]))


def shown_ranks(facts: Facts, sort: str, host: str) -> list[Facts]:
    """The ranks of a host, "" for all, sorted by a column. Those without the fact come last."""
    fact, _, is_largest_first = COLUMNS[sort]
    ranks = [rank for rank in facts["ranks"] if host in ("", rank["host"])]
    known = [rank for rank in ranks if fact in rank]
    known.sort(key=lambda rank: rank[fact], reverse=is_largest_first)
    return known + [rank for rank in ranks if fact not in rank]


def head_lines(facts: Facts) -> list[str]:
    """What `top` says above its table."""
    ranks = counted(len(facts["ranks"]), "rank")
    steps = f"step {_cell(facts['step'], _text)}, {_cell(facts['rate'], _rate)}"
    parts = [
        f"{_text(facts['name'])} (pid {facts['pid']})",
        _text(facts["phase"]),
        f"{ranks} on {counted(len(hosts_of(facts)), 'host')}",
        *([steps] if facts["step"] is not None else []),
        f"attempt {facts['attempt']}",
        duration(facts["age_s"]),
    ]
    return [", ".join(parts), *([_text(facts["straggler"])] if "straggler" in facts else [])]


def rank_lines(ranks: Sequence[Facts], gpus: Mapping[int, str], width: int = 0) -> list[str]:
    """The table of ranks: a line of names, and one for each. `gpus` has the text of the ranks on GPUs.

    Args:
        width: of the terminal, 0 for any. Whole columns are left out until the table fits.
    """
    names = list(COLUMNS)
    for left_out in ("", *_LEAST_IMPORTANT):
        names = [name for name in names if name != left_out]
        lines = _table(ranks, gpus, names)
        if not width or max(line.find(_MARK) for line in lines) + _LEAST_LINE <= width:
            break
    return [line.replace(_MARK, "").rstrip() for line in lines]


def _table(ranks: Sequence[Facts], gpus: Mapping[int, str], names: Sequence[str]) -> list[str]:
    """A mark stands before the last column, which a terminal may cut."""
    rows = [[*map(str.upper, names), *(["GPU"] if gpus else []), f"{_MARK}LAST LINE"]]
    for rank in ranks:
        cells = [_cell(rank.get(COLUMNS[name][0]), COLUMNS[name][1]) for name in names]
        gpu = [gpus.get(rank["rank"], "-")] if gpus else []
        rows.append([*cells, *gpu, f"{_MARK}{_text(rank['line'])}"])
    right = [index for index, name in enumerate(names) if name not in ("host", "state")]
    return align_columns(rows, right=right).split("\n")


def _cell(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)
