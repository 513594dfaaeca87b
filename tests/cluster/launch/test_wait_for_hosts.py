"""`--wait-for-hosts`: hosts whose names do not resolve at first, and whose sshd starts late.

Tests mpiddp/launch/preflight.py.
python -m pytest tests/cluster/launch/test_wait_for_hosts.py
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Program
from tests.support.cluster.ssh import start_sshd, stop_sshd
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

MPIDDP = str(Path(sys.executable).with_name("mpiddp"))
SHOW = "import os; print('shown', os.environ['RANK'], os.environ['GROUP_RANK'], flush=True)"


@pytest.fixture
def late() -> Iterator[Cluster]:
    """Three hosts. node1 has no name on node0, and node2 no sshd."""
    with cluster.up_or_skip(3) as hosts:
        (hosts.shared / "show.py").write_text(SHOW)
        names = hosts["node0"].path("/etc/hosts")
        names.with_name("hosts.whole").write_text(names.read_text())
        names.write_text("".join(line for line in names.open() if "node1" not in line))
        stop_sshd(hosts["node2"])
        yield hosts


def launch(hosts: Cluster, *options: str) -> Program:
    command = [MPIDDP, "launch", "-H", "node0:1,node1:1,node2:1", *options]
    return hosts["node0"].popen([*command, hosts.shared / "show.py"], cwd=ROOT)


def line_with(program: Program, text: str) -> str:
    """The next line of its stderr that contains `text`."""
    assert program.stderr is not None
    deadline = time.monotonic() + PATIENCE_S
    read = []
    while time.monotonic() < deadline:
        line = program.stderr.readline()
        read.append(line)
        if text in line:
            return line.rstrip("\n")
        assert line, f"it ended: {read}"
    raise TimeoutError(f"no line with {text!r}: {read}")


def test_a_job_starts_once_all_hosts_answer(late: Cluster) -> None:
    job = launch(late, "--wait-for-hosts", "10m")
    line = line_with(job, "answer")
    assert line.startswith("mpiddp: 1 of 3 hosts answer; waiting for node1, node2 (up to ")
    node0 = late["node0"]
    node0.path("/etc/hosts").write_text(node0.path("/etc/hosts.whole").read_text())
    line = line_with(job, "answer")
    assert line.startswith("mpiddp: 2 of 3 hosts answer; waiting for node2 (up to ")
    start_sshd([late["node2"]])
    line = line_with(job, "answer")
    assert line.startswith("mpiddp: all 3 hosts answer after ")
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == ["shown 0 0", "shown 1 1", "shown 2 2"]


def test_the_preflight_explains_the_hosts_that_never_answer(late: Cluster) -> None:
    job = launch(late, "--wait-for-hosts", "3s")
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    *progress, first, second = stderr.splitlines()
    assert progress
    assert re.fullmatch(error("be resolved", "node1: ", "node0", "/etc/hosts"), first), first
    assert re.fullmatch(error("connection refused", "ssh node2: "), second), second
    assert (job.returncode, stdout) == (2, "")


def test_ctrl_c_ends_the_wait(late: Cluster) -> None:
    job = launch(late, "--wait-for-hosts", "10m")
    line_with(job, "waiting for")
    job.send_signal(signal.SIGINT)
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "interrupted"
