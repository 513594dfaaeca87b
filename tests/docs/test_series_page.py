"""The page of examples/series shows what each step changes.

python -m pytest tests/docs/test_series_page.py
"""

from __future__ import annotations

import difflib
from itertools import pairwise

from tests.support.ranks import ROOT

SERIES = ROOT / "examples/series"
STEPS = ("one_device.py", "one_host.py", "many_hosts.py", "sharded.py")


def test_the_page_shows_what_each_step_changes() -> None:
    """`python -m pytest` prints the block that the page should have."""
    page = (SERIES / "README.md").read_text()
    for before, after in pairwise(STEPS):
        block = difference(before, after)
        assert block in page, f"{before} to {after}:\n{block}"


def difference(before: str, after: str) -> str:
    """The changed lines below the docstring, with a line of context, as the page shows them."""
    texts = [(SERIES / name).read_text().partition('"""\n\n')[2] for name in (before, after)]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), n=1, lineterm="")
    shown = ["…" if line.startswith("@@") else line.rstrip() for line in list(lines)[3:]]
    return "\n".join(["```diff", *shown, "```"])
