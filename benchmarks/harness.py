"""Shared by the scripts of this folder: what their jobs see, a table for a page, the MPIs."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.mpis import PACKAGES
from tests.support.ranks import ROOT

OPENMPI5 = "openmpi5"  # installed in this environment; tests.support.mpis installs the others
MPIS = (OPENMPI5, *PACKAGES)
# Of jobs: they import this checkout, and a rank has one thread, as under torchrun.
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for a page of docs/."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
