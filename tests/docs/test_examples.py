"""The pages of the examples show the examples' own lines.

python -m pytest tests/docs/test_examples.py
"""

from __future__ import annotations

import difflib
from itertools import pairwise

from tests.support.own_script import EXAMPLE, PLAIN
from tests.support.ranks import ROOT

SERIES = ROOT / "examples/series"
STEPS = ("one_device.py", "one_host.py", "many_hosts.py", "sharded.py")
PITFALLS = ROOT / "examples/pitfalls"


def test_the_example_adds_fewer_than_ten_lines() -> None:
    texts = [path.read_text().partition('"""\n\n')[2].splitlines() for path in (PLAIN, EXAMPLE)]
    differences = list(difflib.ndiff(*texts))
    added = [line for line in differences if line.startswith("+ ") and line[2:].strip()]
    assert len(added) < 10, added
    removed = [line for line in differences if line.startswith("- ")]
    assert removed == ["-     for step in range(1, STEPS + 1):"]


def test_the_page_shows_the_lines_of_the_example() -> None:
    page = (ROOT / "docs/your-own-script.md").read_text()
    example_lines = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    for step in ("## 1. ", "## 3. "):
        block = page.partition(step)[2].partition("```python\n")[2].partition("```")[0]
        lines = {line.strip() for line in block.splitlines()} - {"", "..."}
        assert lines, step
        assert lines <= example_lines, step


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


def test_the_page_of_the_pitfalls_names_each_script() -> None:
    page = (PITFALLS / "README.md").read_text()
    assert [path.name for path in PITFALLS.glob("*.py") if f"]({path.name})" not in page] == []
