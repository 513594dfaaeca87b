"""examples/ddp_with_checkpoints.py adds fewer than ten lines, which its page shows.

Tests mpiddp/checkpoints/script.py under launchers.
python -m pytest tests/docs/test_own_script_page.py
"""

from __future__ import annotations

import difflib

from tests.support.own_script import EXAMPLE, PLAIN
from tests.support.ranks import ROOT


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
