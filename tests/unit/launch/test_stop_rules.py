"""The times of --grace, and the step that a stop ends.

Tests mpiddp/launch/supervise/, mpiddp/runtime/job/stop.py.
python -m pytest tests/unit/launch/test_stop_rules.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.launch.options import option_parser
from mpiddp.runtime.job.stop import StopRequest
from tests.support.errors import error


def test_a_stop_of_one_rank_is_known_before_the_step_that_it_ends() -> None:
    stop = StopRequest(send=lambda kind: None, progress=lambda step: None, wake=lambda: None)
    stop.is_requested = True
    assert not stop.stops_next(), "the script may never call should_stop"
    stop.is_requested = False
    assert not stop.should_stop()
    assert not stop.stops_next()
    stop.is_requested = True  # too late for this step
    assert not stop.should_stop()
    assert stop.stops_next()
    assert stop.should_stop()
    assert stop.stops_next()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("55m", 3300.0), ("1.5h", 5400.0)]
)
def test_grace_accepts_times_with_units(text: str, seconds: float) -> None:
    assert option_parser().parse_args(["--grace", text, "script.py"]).grace_s == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "5d", "soon", "nan"])
def test_grace_refuses_an_invalid_time(text: str) -> None:
    values = ("argument --grace: ", f"'{text}'", "90, 90s, 55m or 1.5h", "1000 days")
    with pytest.raises(UserError, match=error("--help", *values)):
        option_parser().parse_args([f"--grace={text}", "script.py"])
