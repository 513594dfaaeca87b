"""What the monitor of an attempt says, and what a viewer gets of it.

Tests mpiddp/launch/monitor/monitor.py.
python -m pytest tests/unit/launch/test_monitor.py
"""

from __future__ import annotations

from typing import Any

import pytest

from mpiddp.launch.monitor.monitor import Monitor
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.options import parse_options
from mpiddp.protocol.server import Message
from tests.support.channels import progress, stacks

HELD = (
    "rank 0 on a holds the others up: it works for 800 ms in a step of 1.0 s, 4.0 times as long as "
    "they do."
)


def monitor_of(ranks: Ranks, *options: str) -> Monitor:
    return Monitor(ranks, parse_options([*options, "--", "ls"]), 0.0)


def unequal_steps(ranks: Ranks, monitor: Monitor, count: int) -> list[str]:
    """The first rank works four times as long in each step, of one second. Returns what is said."""
    said = []
    for step in range(1, count + 1):
        for rank, own_s in enumerate((0.8, 0.2)):
            ranks.note(Message(rank, "progress", progress(step, own_s=own_s * step), float(step)))
        said += monitor.look(float(step), float(step))
    return said


def test_the_rank_that_holds_the_others_up_is_said_once_and_always_shown() -> None:
    ranks = Ranks(("a", "b"))
    monitor = monitor_of(ranks)
    assert "holder" not in monitor.job_facts({}, 0.0)
    assert monitor.status_lines(1, 0.0) == []
    assert unequal_steps(ranks, monitor, 200) == [HELD]
    facts = monitor.job_facts({1: b"hello\n"}, 200.0)
    assert (facts["holder"], facts["step"], facts["ranks"][1]["line"]) == (HELD, 200, "hello")
    first, second = monitor.status_lines(2, 200.0)
    assert first == "step 200  1 steps/s"
    assert second == "2 ranks on 2 hosts  attempt 2  1.1 GB a rank  rank 0 on a holds the others up"
    assert monitor.slow_hosts == {"a": pytest.approx(0.25)}


@pytest.mark.parametrize(
    ("options", "running_s", "step", "is_said"),
    [
        (("--hang-timeout", "90s"), 90.0, False, True),
        (("--hang-timeout", "90s"), 89.0, False, False),
        (("--hang-timeout", "90s"), 90.0, True, False),
        ((), 90.0, False, False),
    ],
)
def test_a_command_that_says_nothing_of_its_steps_cannot_be_watched(
    options: tuple[str, ...], running_s: float, step: bool, is_said: bool
) -> None:
    ranks = Ranks(("a",))
    monitor = monitor_of(ranks, *options)
    if step:
        ranks.note(Message(0, "progress", progress(1), 1.0))
    expected = (
        "no rank has made a step in 90 s. --hang-timeout watches a command only if its script calls "
        "mpiddp.should_stop() in every step."
    )
    assert monitor.look(running_s, running_s) == ([expected] if is_said else [])


def test_a_script_that_makes_no_step_is_not_spoken_of() -> None:
    monitor = Monitor(Ranks(("a",)), parse_options(["--hang-timeout", "90s", "-m", "x"]), 0.0)
    assert monitor.look(100.0, 100.0) == []


def test_a_viewer_gets_the_stacks_and_who_is_where() -> None:
    ranks = Ranks(("a", "b"))
    text = 'thread MainThread:\n  File "/home/me/data.py", line 40, in load\n    read(path)\n'
    sent: dict[str, Any] = stacks(text)
    ranks.note(Message(1, "stacks", sent, 1.0))
    found = monitor_of(ranks).stacks_facts()
    assert found["stacks"] == {1: text}
    assert "rank 1 on b is in load (data.py:40): read(path)" in found["sentence"]


def test_stacks_are_wanted_of_a_quiet_job() -> None:
    ranks = Ranks(("a", "b"))
    monitor = monitor_of(ranks)
    assert not monitor.wants_stacks(59.0, silent_s=59.0)
    assert monitor.wants_stacks(61.0, silent_s=61.0)
    assert not monitor.wants_look(61.0)  # no rank makes steps
    for step in range(1, 10):
        for rank in (0, 1):
            ranks.note(Message(rank, "progress", progress(step, own_s=0.1 * step), 60.0 + step))
    assert monitor.wants_look(70.0)  # all wait for most of a step
    assert not monitor.wants_stacks(71.0, silent_s=71.0)
    assert monitor.look_at_steps(70.0) == []
    assert monitor.look_at_stacks(71.0) == []
