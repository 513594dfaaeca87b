"""The user and the port of sshd that a hostfile gives a host: the preflight and every MPI use both.

Tests mpiddp/hosts/hostfile.py, mpiddp/launch/starters/.
python -m pytest tests/cluster/launch/test_users_and_ports.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import USER, Cluster, faults
from tests.support.errors import error
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.ranks import LAUNCH, ROOT

PORT = 2222
WHO = """
import os, pwd, socket
print(f"{os.environ['RANK']} {socket.gethostname()} {pwd.getpwuid(os.getuid()).pw_name}\\n", end="")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """On node1, only USER may log in, and only at PORT."""
    with cluster.up_or_skip(2) as standing:
        node1 = standing["node1"]
        with faults.another_port(standing, node1, PORT), faults.another_user(node1):
            (standing.shared / "who.py").write_text(WHO)
            yield standing


@pytest.mark.parametrize("mpi", ["openmpi5", *PACKAGES])
def test_a_job_reaches_a_host_as_its_user_at_its_port(hosts: Cluster, mpi: str) -> None:
    hostfile = hosts.shared / "hosts"
    hostfile.write_text(f"node1 slots=2 user={USER} port={PORT}\nnode0 slots=1\n")
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), "--hostfile", str(hostfile)]
    done = hosts["node0"].run([*command, str(hosts.shared / "who.py")], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ranks = [f"0 node1 {USER}", f"1 node1 {USER}", "2 node0 root"]
    assert sorted(done.stdout.splitlines()) == ranks


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"node1 user={USER}", error("connection refused", "ssh node1: ", "node1 port=N")),
        (
            f"node1 port={PORT}",
            error(
                "Run: ssh-copy-id", "ssh node1: ", "(publickey)", f"ssh-copy-id -p {PORT} node1 "
            ),
        ),
    ],
)
def test_without_one_of_them_the_host_is_refused(hosts: Cluster, line: str, sentence: str) -> None:
    """So the job above shows that both reach ssh."""
    hostfile = hosts.shared / "hosts"
    hostfile.write_text(f"{line} slots=1\nnode0 slots=1\n")
    command = [*LAUNCH, "--hostfile", str(hostfile), str(hosts.shared / "who.py")]
    done = hosts["node0"].run(command, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
