"""Medians, spreads and tables: how several measurements of the same thing become a line."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from mpiddp.text import align_columns

Spread = dict[str, float]  # median, low, high: as JSON has it


def spread(values: Sequence[float]) -> Spread:
    """The middle one of several measurements of one thing, the lowest and the highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def shown(values: Spread, form: str, factor: float = 1.0) -> str:
    """ "1.05 (0.98 to 1.11)"."""
    middle, low, high = (format(values[name] * factor, form) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text: its first column to the left, the others to the right."""
    return align_columns([head, *rows], right=range(1, len(head)))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a page of docs/."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def size_name(num_bytes: int) -> str:
    """ "1 KiB", "64 MiB"."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g} {unit}"
    return f"{num_bytes} B"
