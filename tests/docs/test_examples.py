"""The pages of the examples show the examples' own lines."""

import difflib
from itertools import pairwise

from tests.support.own_script import EXAMPLE, PLAIN
from tests.support.ranks import ROOT

SERIES = ROOT / "examples/series"
STEPS = ("one_device.py", "one_host.py", "many_hosts.py", "sharded.py")
PITFALLS = ROOT / "examples/pitfalls"


def test_the_example_adds_fewer_than_ten_lines():
    texts = [path.read_text().partition('"""\n\n')[2].splitlines() for path in (PLAIN, EXAMPLE)]
    differences = list(difflib.ndiff(*texts))
    added = [line for line in differences if line.startswith("+ ") and line[2:].strip()]
    assert len(added) < 10, added
    removed = [line for line in differences if line.startswith("- ")]
    assert removed == ["-     for step in range(1, STEPS + 1):"]


def test_the_page_shows_the_lines_of_the_example():
    page = (ROOT / "docs/your-own-script.md").read_text()
    example_lines = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    for step in ("## 1. ", "## 3. "):
        block = page.partition(step)[2].partition("```python\n")[2].partition("```")[0]
        lines = {line.strip() for line in block.splitlines()} - {"", "..."}
        assert lines, step
        assert lines <= example_lines, step


def test_the_page_shows_lines_that_each_step_adds():
    page = (SERIES / "README.md").read_text()
    for number, (before, after) in enumerate(pairwise(STEPS), 2):
        section = page.partition(f" to {number}: ")[2].partition("\n## ")[0]
        shown = stripped(section.partition("```python\n")[2].partition("```")[0])
        added = stripped((SERIES / after).read_text()) - stripped((SERIES / before).read_text())
        assert shown, after
        assert shown <= added, shown - added


def stripped(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


def test_the_page_of_the_pitfalls_names_each_script():
    page = (PITFALLS / "README.md").read_text()
    assert [path.name for path in PITFALLS.glob("*.py") if f"]({path.name})" not in page] == []
