"""Medians, spreads and tables: how several measurements of the same thing become a line."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

Spread = dict[str, float]  # median, low, high: as JSON has it


def spread(values: Sequence[float]) -> Spread:
    """The middle one of several measurements of one thing, the lowest and the highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` of all do not exceed, interpolated."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def shown(values: Spread, form: str, factor: float = 1.0) -> str:
    """ "1.05 (0.98 to 1.11)"."""
    middle, low, high = (format(values[name] * factor, form) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text: its first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


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
