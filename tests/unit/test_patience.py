"""The limits of the tests themselves: they grow with the slowness of the machine, up to a bound."""

import time

import pytest

from tests.support import patience
from tests.support.patience import eventually, within


@pytest.mark.parametrize(
    ("slow", "outcome"),
    [(1.0, AssertionError), (2.0, AssertionError), (5.0, pytest.skip.Exception), (9.0, None)],
)
def test_a_promised_time_is_judged_on_a_machine_that_is_not_too_slow(monkeypatch, slow, outcome):
    monkeypatch.setattr(patience, "slowness", lambda: slow)
    seconds = 0.05 if outcome else 5.0
    if outcome is None:
        with within(seconds):
            pass
        return
    with pytest.raises(outcome), within(seconds):
        time.sleep(4 * seconds)


@pytest.mark.parametrize("slow", [1.0, 2.0, 50.0])
def test_a_wait_that_fails_is_bounded(monkeypatch, slow):
    monkeypatch.setattr(patience, "slowness", lambda: slow)
    monkeypatch.setattr(patience, "EVENT_S", 0.1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="still waiting after"):
        eventually(lambda: False)
    assert time.monotonic() - began >= 0.1 * min(slow, patience.MOST)
