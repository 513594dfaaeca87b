"""What holds for every test: its folder says what it needs, and whatever it starts has a time limit.

Tests tests/.
python -m pytest tests/integration/suite/test_rules_of_tests.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import LONGEST_FIRST

TESTS = Path(__file__).parents[2]
FOLDERS = {"unit", "integration", "docs", "ranks", "cluster", "frameworks"}
RUNS = ("run", "check_call", "check_output")  # of subprocess


def test_each_test_lies_in_a_folder_that_says_what_it_needs() -> None:
    assert {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} == FOLDERS


def test_the_names_of_the_files_differ() -> None:
    """A name is enough to find a file, and to say in which order it starts."""
    names = [path.stem for path in TESTS.rglob("test_*.py") if path.parent.name != "smoke"]
    assert len(names) == len(set(names))


def test_the_files_that_take_longest_exist() -> None:
    names = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    assert set(LONGEST_FIRST.split()) <= names


def test_every_process_that_a_test_waits_for_has_a_time_limit() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if path.name != Path(__file__).name]
    assert len(files) > 100
    assert [f"{path}:{line}" for path in files for line in _without_limit(path)] == []


def _without_limit(path: Path) -> Iterator[int]:
    """The lines with a call that waits for a process, and names no timeout."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        is_run = name in RUNS and ast.unparse(node.func.value) == "subprocess"
        waits = is_run or name == "communicate" or (name == "wait" and not node.args)
        if waits and not {"timeout", None} & {keyword.arg for keyword in node.keywords}:
            yield node.lineno
