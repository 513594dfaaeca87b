"""A stop request after a growth that found no host.

Tests mpiddp/launch/restarts.py.
python -m pytest tests/unit/launch/test_growth_in_vain.py
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mpiddp.errors import FAILED, INTERRUPTED, STOPPED
from mpiddp.launch import restarts
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import Plan, make_plan
from mpiddp.launch.supervise.run import Outcome
from mpiddp.launch.supervise.signals import queued_signals
from mpiddp.launch.supervise.verdict import Stop
from tests.support.an_mpirun import an_mpirun


@pytest.mark.parametrize(("code", "after"), [(STOPPED, STOPPED), (FAILED, INTERRUPTED)])
def test_a_stop_request_after_a_growth_in_vain(tmp_path: Path, code: int, after: int) -> None:
    """It loses no step only if the stop for the growth has saved."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("localhost slots=1\n")
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", str(hostfile)]
    options = parse_options([*where, "--grow", "1h", "-m", "platform"])
    before = make_plan(options, os.environ)
    with queued_signals() as signals:
        job = restarts._Job(options, before, time.time(), signals, None)
        hostfile.write_text("localhost slots=2\n")
        grown = job._plan_next(Outcome(code, "the ranks did not stop.", stop=Stop.TO_GROW))
        assert isinstance(grown, Plan)
        assert grown.request.world_size == 2
        os.kill(os.getpid(), signal.SIGTERM)
        ended = job._plan_next(Outcome(FAILED, "the job did not start."))
    assert isinstance(ended, Outcome)
    assert ended.code == after
