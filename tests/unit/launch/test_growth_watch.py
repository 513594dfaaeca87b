"""The parts of --grow that need no other host: what it refuses, a look, the thread that looks.

Tests mpiddp/launch/{grow,job}.py.
python -m pytest tests/unit/launch/test_growth_watch.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.launch.grow import look
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.plan import Plan, make_plan
from tests.support.an_mpirun import an_mpirun

# --- one look ---


def planned(tmp_path: Path, listed: str, *options: str) -> tuple[LaunchOptions, Plan]:
    """The options and the plan of a job on the hosts of `hosts.txt`."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(listed)
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", str(hostfile)]
    found = parse_options([*where, "--grow", "1h", *options, "--", "true"])
    return found, make_plan(found, os.environ)


@pytest.mark.parametrize(
    ("options", "later", "found"),
    [
        ((), "localhost slots=2\n", ""),
        ((), "localhost slots=3\n", "localhost has more slots"),
        ((), "localhost slots=1\n", ""),
        ((), "localhost\n", ""),
        (("-n", "2"), "localhost slots=3\n", ""),
        # A host without a rank is not asked, nor is one that is only a spare.
        ((), "localhost slots=2\nnowhere.invalid slots=0\n", ""),
        (("--spares", "0"), "localhost slots=2\n", ""),
    ],
)
def test_a_look_at_this_machine(
    tmp_path: Path, options: tuple[str, ...], later: str, found: str
) -> None:
    with_options, plan = planned(tmp_path, "localhost slots=2\n", *options)
    (tmp_path / "hosts.txt").write_text(later)
    assert look(with_options, plan) == found


@pytest.mark.parametrize(
    ("options", "later", "found"),
    [
        ((), "localhost slots=1\na.invalid slots=1\nb.invalid slots=1\n",
         "a.invalid and b.invalid can join"),
        (("--spares", "0"), "localhost slots=2\na.invalid slots=1\n", "a.invalid can join"),
        ((), "localhost slots=2\n", "localhost has more slots"),
        (("-n", "1"), "localhost slots=1\na.invalid slots=1\n", ""),
    ],
)  # fmt: skip
def test_hosts_that_nobody_checks_can_join(
    tmp_path: Path, options: tuple[str, ...], later: str, found: str
) -> None:
    with_options, plan = planned(tmp_path, "localhost slots=1\n", *options)
    (tmp_path / "hosts.txt").write_text(later)
    assert look(unchecked(with_options), plan) == found


def unchecked(options: LaunchOptions) -> LaunchOptions:
    return replace(options, check=False)


def test_a_spare_does_not_join(tmp_path: Path) -> None:
    options, plan = planned(tmp_path, "localhost slots=1\n")
    with_spare = unchecked(replace(options, spares=1))
    for later, found in (
        ("a.invalid slots=1\n", ""),
        ("a.invalid slots=1\nb.invalid slots=1\n", "a.invalid and b.invalid can join"),
    ):
        (tmp_path / "hosts.txt").write_text(f"localhost slots=1\n{later}")
        assert look(with_spare, plan) == found


# --- the thread that looks ---
