"""A job on hosts with 127.0.1.1, container bridges, a dead network and different interface names.

The broadcast of every MPI, and gloo after it, must use the one network that works.

Tests mpiddp/runtime/rendezvous/result.py, mpiddp/launch/network.py.
python -m pytest tests/cluster/launch/test_network_of_a_job.py
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import USER, Cluster, Layout
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.ranks import ROOT, find_mpirun

MPIDDP = str(Path(sys.executable).with_name("mpiddp"))
SHOW = (
    "import os, socket, torch.distributed as dist; dist.init_process_group('gloo'); "
    "dist.barrier(); e = os.environ; "
    "print(e['RANK'], e['LOCAL_RANK'], e['GROUP_RANK'], socket.gethostname(), "
    "e['GLOO_SOCKET_IFNAME'], e['MASTER_ADDR'])"
)


@pytest.fixture(scope="module")
def odd_hosts() -> Iterator[Cluster]:
    layout = Layout(
        interfaces=("eth0", "ens5", "enp3s0"),
        own_name_is_loopback=True,
        decoys=("docker0", "virbr0"),
        dead_network=True,
    )
    with cluster.up_or_skip(3, layout=layout) as standing:
        yield standing


@pytest.mark.parametrize(
    ("mpi", "user"),
    [
        ("openmpi5", "root"),
        ("openmpi5", USER),
        ("openmpi4", "root"),
        ("mpich", "root"),
        ("intelmpi", "root"),
    ],
)
def test_unequal_slots_on_odd_hosts(odd_hosts: Cluster, mpi: str, user: str) -> None:
    """Ranks follow the order of the hostfile, in which the launching host is second."""
    mpirun = mpirun_of(mpi)
    script = odd_hosts.shared / "show.py"
    script.write_text(SHOW)
    command = [MPIDDP, "launch", "-v", "--mpirun", mpirun, "-H", "node1:2,node0:1,node2:1"]
    done = odd_hosts["node0"].run([*command, str(script)], cwd=ROOT, user=user)
    assert done.returncode == 0, done.stderr
    master = odd_hosts["node1"].address
    shown = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert sorted(shown) == [
        f"0 0 0 node1 ens5 {master}",
        f"1 1 0 node1 ens5 {master}",
        f"2 0 1 node0 eth0 {master}",
        f"3 0 2 node2 enp3s0 {master}",
    ]
    reason = (  # printed with -v
        "node1's own name resolves to 127.0.1.1, which no other host can reach. "
        f"Using {master} (ens5); --master-addr overrides."
    )
    assert reason in done.stdout


NAME_SERVER = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 53))
print("ready", flush=True)
while True:
    print(server.recv(4096), flush=True)
"""


@contextmanager
def silent_name_server(hosts: Cluster) -> Iterator[Callable[[], list[str]]]:
    """Give all hosts a DNS server that does not answer. Yields a function for its reverse lookups."""
    node2 = hosts["node2"]
    texts = {
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "/etc/resolv.conf": f"options timeout:1 attempts:1\nnameserver {node2.address}\n",
    }
    files = [(host.path(path), texts[path]) for host in hosts.hosts for path in texts]
    before = [file.read_text() for file, _ in files]
    with node2.popen([sys.executable, "-c", NAME_SERVER, node2.address]) as server:
        assert server.stdout is not None
        stdout = server.stdout
        assert stdout.readline() == "ready\n"

        def reverse_lookups() -> list[str]:
            server.end()
            return [line for line in stdout.read().splitlines() if "in-addr" in line]

        for file, text in files:
            file.write_text(text)
        try:
            yield reverse_lookups
        finally:
            for (file, _), text in zip(files, before, strict=True):
                file.write_text(text)


def test_no_reverse_dns_lookups(odd_hosts: Cluster) -> None:
    """torch looks up the name of each address that it connects to, which would take 5 s or more."""
    script = odd_hosts.shared / "nothing.py"
    script.write_text("")
    with silent_name_server(odd_hosts) as reverse_lookups:
        command = [MPIDDP, "launch", "-H", "node1:2,node0:1", str(script)]
        done = odd_hosts["node0"].run(command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert reverse_lookups() == []


BARE_STORE = """
import sys
from torch.distributed import TCPStore
TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
"""


def test_torch_still_makes_reverse_dns_lookups(odd_hosts: Cluster) -> None:
    """Once this fails, no_dns of mpiddp/runtime/rendezvous/store.py is no longer needed."""
    node0 = odd_hosts["node0"]
    with silent_name_server(odd_hosts) as reverse_lookups:
        done = node0.run([sys.executable, "-c", BARE_STORE, node0.address], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert reverse_lookups() != []


def test_a_plain_mpirun_avoids_the_bridges(odd_hosts: Cluster) -> None:
    """Without the launcher, each rank excludes the bridges from MPI. The user names the working network."""
    script = odd_hosts.shared / "show.py"
    script.write_text(SHOW)
    line = (
        f"{find_mpirun()} --allow-run-as-root -np 2 -H node0:1,node1:1 "
        f"-x MPIDDP_INTERFACE=10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 "
        f"{sys.executable} -m mpiddp run {script}"
    )
    done = odd_hosts["node0"].run(shlex.split(line), cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[3] for line in done.stdout.splitlines()) == ["node0", "node1"]


def test_an_interface_that_one_host_lacks(odd_hosts: Cluster) -> None:
    script = odd_hosts.shared / "show.py"
    script.write_text(SHOW)
    command = [MPIDDP, "launch", "--interface", "eth0", "-H", "node0:1,node1:1", str(script)]
    done = odd_hosts["node0"].run(command, cwd=ROOT)
    assert done.returncode == 2
    sentence = error("interface", '"eth0"', "node1", "lo")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_host_may_be_named_by_its_second_address(odd_hosts: Cluster) -> None:
    node0 = odd_hosts["node0"]
    interface = node0.interface
    node0.run(["ip", "address", "add", "10.79.0.1/24", "dev", interface], check=True)
    try:
        command = [MPIDDP, "launch", "-H", "10.79.0.1:1", "-m", "platform"]
        done = node0.run(command, cwd=ROOT)
    finally:
        node0.run(["ip", "address", "del", "10.79.0.1/24", "dev", interface], check=True)
    assert (done.returncode, done.stderr) == (0, "")
