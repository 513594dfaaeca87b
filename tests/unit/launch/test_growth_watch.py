"""The parts of --grow that need no other host: what it refuses, a look, the thread that looks.

Tests mpiddp/launch/{grow,job}.py.
python -m pytest tests/unit/launch/test_growth_watch.py
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.launch.grow import HostSearch, look
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.plan import Plan, make_plan
from tests.support.an_mpirun import an_mpirun
from tests.support.patience import PATIENCE_S

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


def test_a_host_that_does_not_answer_is_not_found(tmp_path: Path) -> None:
    options, plan = planned(tmp_path, "localhost slots=1\n")
    (tmp_path / "hosts.txt").write_text("localhost slots=1\nnowhere.invalid slots=1\n")
    assert look(options, plan) == ""


# --- the thread that looks ---


def test_looks_repeat_until_the_search_is_closed(tmp_path: Path) -> None:
    options, plan = planned(tmp_path, "localhost slots=1\n")
    every = replace(options, grow_s=0.05)
    search = HostSearch(every, plan)
    (tmp_path / "hosts.txt").write_text("localhost slots=2\n")
    before = threading.active_count()
    assert not select.select([search], [], [], 0.2)[0]  # it has not begun
    search.begin()
    for _ in range(2):
        assert select.select([search], [], [], PATIENCE_S)[0]
        assert search.found() == "localhost has more slots"
    search.close()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
