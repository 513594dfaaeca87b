"""Programs that do not end in time, on hosts that are this machine: they are ended, and what they said stays.

Tests mpiddp/hosts/ssh.py, cluster/{run,run_agent,keys}.py.
python -m pytest tests/integration/hosts/test_time_limits.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from mpiddp.hosts.cluster import keys
from mpiddp.hosts.cluster.run import Outcome, run
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import run_on_hosts

HERE = Host("localhost")


@pytest.fixture(autouse=True)
def python3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_a_program_that_does_not_end_is_killed() -> None:
    program = "import time; print(1, flush=True); time.sleep(1000)"
    began = time.monotonic()
    answer = run_on_hosts([HERE], sys.executable, program, timeout_s=0.1, work_s=0.2)[HERE]
    assert (answer.exit_code, answer.stdout) in ((None, "1\n"), (None, ""))
    assert 0.1 <= time.monotonic() - began < 60


def test_a_command_that_does_not_end(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    outcomes = run([HERE], ["sh", "-c", f"echo $$ > {file}; sleep 1000"], timeout_s=1.0)
    assert outcomes[HERE] == Outcome("", "", "no end in 1 s; stopped")
    deadline = time.monotonic() + 60
    while file.exists() and Path("/proc", file.read_text().strip()).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_was_printed_before_the_time_was_over() -> None:
    """It may be no UTF-8, such as the banner of a host."""
    for end in ("sleep 1000", "exit 1"):
        done = keys._run(["sh", "-c", f"printf 'caf\\351\\n'; {end}"], limit_s=1.0)
        assert (done.returncode, done.stdout) == (1, "caf\N{REPLACEMENT CHARACTER}\n")
