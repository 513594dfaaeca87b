"""Two hosts with a shared folder and one --out.

Tests mpiddp/checkpoints/run.py.
python -m pytest tests/cluster/train/test_run_owner_on_hosts.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Program
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

TRAIN = ("-m", "mpiddp", "train", "--use-syn", "--arch=resnet20", "--batch-size=2", "--epochs=1")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def test_two_hosts_with_a_shared_folder(hosts: Cluster) -> None:
    """The owner runs on node0. node1 cannot see its processes."""
    out = hosts.shared / "run"
    command = [sys.executable, *TRAIN, "--save-every=5", "--out", str(out)]
    env = {"OMP_NUM_THREADS": "1"}
    with hosts["node0"].popen(command, cwd=ROOT, env=env) as first:
        wait_for_line(first, "images/s")
        second = hosts["node1"].run(command, cwd=ROOT, env=env)
        assert second.returncode == 2, second.stderr
        assert "watching for 60 s" in second.stdout
        assert re.search(error("Wait for", f"{out}: ", " on node0 (process "), second.stderr)
        assert first.poll() is None
        first.end()
    with hosts["node0"].popen(command, cwd=ROOT, env=env) as again:
        printed = wait_for_line(again, "images/s")
        again.end()
    assert "resuming from" in printed
    assert "watching" not in printed


def wait_for_line(program: Program, text: str) -> str:
    """Everything that the program printed up to a line with the text."""
    assert program.stdout is not None
    printed = ""
    while text not in (line := program.stdout.readline()):
        assert line, program.communicate(timeout=PATIENCE_S)
        printed += line
    return printed
