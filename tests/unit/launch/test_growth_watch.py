"""One look of --grow: which hosts of the list as it is now can join.

Tests mpiddp/launch/plan.py. The promises on restarts have the thread that looks.
python -m pytest tests/unit/launch/test_growth_watch.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan, search_once
from tests.support.machine import an_mpirun

BOTH = "localhost slots=1\na.invalid slots=1\nb.invalid slots=1\n"
FIRST = "localhost slots=1\na.invalid slots=1\n"


@pytest.mark.parametrize(
    ("options", "spares", "later", "found"),
    [
        ("", 0, "localhost slots=1\n", ""),
        ("", 0, "localhost slots=0\n", ""),
        ("", 0, "localhost\n", ""),
        ("", 0, "localhost slots=x\n", ""),
        # A host without a rank is not asked.
        ("", 0, "localhost slots=1\nnowhere.invalid slots=0\n", ""),
        # Those that nobody checks:
        ("--no-check", 0, BOTH, "a.invalid and b.invalid can join"),
        ("--no-check -n 1", 0, FIRST, ""),
        # One is only a spare.
        ("--no-check", 1, FIRST, ""),
        ("--no-check", 1, BOTH, "a.invalid and b.invalid can join"),
    ],
)
def test_a_search(tmp_path: Path, options: str, spares: int, later: str, found: str) -> None:
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("localhost slots=1\n")
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", str(hostfile)]
    parsed = parse_options([*where, *options.split(), "--", "true"])
    plan = make_plan(parsed, os.environ)
    hostfile.write_text(later)
    assert search_once(replace(parsed, spares=spares), plan) == ([found] if found else [])
