"""Shared by the scripts of this folder: the variables of their jobs, and a table for a page."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.ranks import ROOT

# The variables of jobs, which import this checkout. A rank has one thread, as under torchrun.
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for a page of docs/."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
