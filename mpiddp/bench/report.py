"""Medians, spreads and tables of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence

from mpiddp.text import align_columns, percentile

Spread = dict[str, float]  # median, low, high: the keys in JSON


def spread(values: Sequence[float]) -> Spread:
    """The median, the lowest and the highest of several measurements."""
    return {"median": percentile(values, 50), "low": min(values), "high": max(values)}


def shown(values: Spread, form: str, factor: float = 1.0) -> str:
    """ "1.05 (0.98 to 1.11)"."""
    middle, low, high = (format(values[name] * factor, form) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table with the first column aligned left and the others right."""
    return align_columns([head, *rows], right=range(1, len(head)))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for a page of docs/."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def size_name(num_bytes: int) -> str:
    """ "1 KiB", "64 MiB"."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g} {unit}"
    return f"{num_bytes} B"
