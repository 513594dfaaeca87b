"""A drill over several hosts.

Tests mpiddp/drill/.
python -m pytest tests/cluster/train/test_drill_on_hosts.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.drills import SCRIPT
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def drill(hosts: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    hostfile = hosts.shared / "hosts.txt"
    hostfile.write_text("node0 slots=1\nnode1 slots=1\n")
    where = ("--hostfile", str(hostfile))
    command = [sys.executable, "-m", "mpiddp", "drill", *options, *where]
    command += [str(ROOT / SCRIPT), "{out}"]
    return hosts["node0"].run(command, cwd=hosts.shared, env=ENV, timeout_s=4 * PATIENCE_S)


def test_a_rank_of_two_hosts_is_killed(hosts: Cluster) -> None:
    done = drill(hosts, "--only", "kill", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    kill = json.loads(done.stdout)[1]
    assert (kill["codes"], kill["weights_equal"]) == ([1, 0], True)
    # Its runs were in the working folder, and no host is blamed for the faults.
    assert [path.name for path in hosts.shared.iterdir()] == ["hosts.txt"]


def test_hosts_that_do_not_share_the_folder(hosts: Cluster, tmp_path: Path) -> None:
    """/run is another one on each host. The undisturbed run says so, and nothing else is tried."""
    done = drill(hosts, "--work", "/run/of-the-drill", "--only", "kill")
    assert done.returncode == 1, done.stderr
    unseen = error("that all", "node1 ", "/run/of-the-drill", "--work DIR")
    assert re.search(unseen, done.stdout), done.stdout
    assert "kill" not in done.stdout
