"""Programs that do not end in time, on hosts that are this machine: they are ended, and what they said stays.

Tests mpiddp/hosts/ssh.py, run.py.
python -m pytest tests/integration/hosts/test_time_limits.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from mpiddp.hosts import main
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


def test_a_command_that_does_not_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It ends with all that it has started, on this machine too."""
    file, hosts = tmp_path / "pid", tmp_path / "hosts"
    hosts.write_text("localhost\n")
    shell = ["sh", "-c", f"echo $$ > {file}; sleep 1000"]
    assert main.main(["run", str(hosts), "--timeout", "1s", "--", *shell]) == 1
    assert capfd.readouterr() == ("", "localhost: no end in 1 s; stopped\n")
    deadline = time.monotonic() + 60
    while file.exists() and Path("/proc", file.read_text().strip()).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
