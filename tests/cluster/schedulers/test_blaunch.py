"""A job of LSF, which cannot run here: a stand-in of blaunch that behaves as IBM documents it.

"The blaunch command provides a drop-in replacement for the rsh and ssh commands" (LSF command reference,
"blaunch"), within a job only. No other ssh is on PATH.
Tests mpiddp/hosts/transport.py, mpiddp/launch/starters/.
python -m pytest tests/cluster/schedulers/test_blaunch.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.ranks import ROOT
from tests.support.stand_ins import two_hosts_with

BLAUNCH = """\
#!/bin/sh
[ "$LSB_JOBID" ] || { echo "blaunch: not within a job" >&2; exit 1; }
[ "$1" = -n ] && shift && exec </dev/null
echo "$1" >> "${0%/*}/calls"
exec /usr/bin/ssh "$@"
"""
SHOW = "import os; print('shown', os.environ['RANK'], os.environ['GROUP_RANK'], flush=True)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with two_hosts_with("blaunch", BLAUNCH, SHOW) as standing:
        yield standing


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich", "intelmpi"])
def test_a_job_reaches_its_hosts_through_blaunch(hosts: Cluster, mpi: str) -> None:
    calls = hosts.shared / "bin/calls"
    calls.write_text("")
    env = {
        "PATH": f"{hosts.shared / 'bin'}:/usr/bin:/bin",
        "LSF_BINDIR": str(hosts.shared / "bin"),
        "LSB_JOBID": "105",
        "LSB_MCPU_HOSTS": "node0 1 node1 2",
    }
    command = [sys.executable, "-m", "mpiddp", "launch", "--mpirun", mpirun_of(mpi)]
    done = hosts["node0"].run([*command, hosts.shared / "show.py"], env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "no hosts given: using LSF job 105, slots=3" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["shown 0 0", "shown 1 1", "shown 2 1"]
    assert calls.read_text().splitlines() == [
        "node1",
        "node1",
    ]  # the preflight, and mpirun's daemon


def test_a_blaunch_that_fails_is_one_sentence(hosts: Cluster) -> None:
    env = {"PATH": f"{hosts.shared / 'bin'}:/usr/bin:/bin", "LSB_MCPU_HOSTS": "node0 1 node1 2"}
    command = [sys.executable, "-m", "mpiddp", "launch", hosts.shared / "show.py"]
    done = hosts["node0"].run(command, env=env, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    values = ("blaunch node1 ", "blaunch: not within a job", ": --hostfile $LSB_DJOB_HOSTFILE")
    assert re.fullmatch(error("Where ssh", *values), done.stderr.splitlines()[-1])
