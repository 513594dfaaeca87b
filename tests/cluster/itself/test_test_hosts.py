"""The test cluster has separate hosts with ssh between them, and leaves nothing behind.

By hand: `python -m tests.support.cluster up 3`.

Tests tests/support/cluster/.
python -m pytest tests/cluster/itself/test_test_hosts.py
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import USER, Cluster, Layout, cpus, faults, links, state
from tests.support.cluster.proc import is_running
from tests.support.cluster.state import Identity, identity
from tests.support.patience import PATIENCE_S

MPIRUN = Path(sys.executable).with_name("mpirun")
REPOSITORY = Path(__file__).parents[3]
# For an address that does not answer.
SSH_WITH_TIMEOUT = ("ssh", "-o", "ConnectTimeout=1")


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


@pytest.fixture(scope="module")
def odd_hosts() -> Iterator[Cluster]:
    layout = Layout(
        interfaces=("eth0", "ens5"),
        own_name_is_loopback=True,
        decoys=("docker0", "virbr0"),
        dead_network=True,
    )
    with cluster.up_or_skip(2, layout=layout) as standing:
        yield standing


@pytest.mark.parametrize("user", ["root", USER])
def test_every_host_logs_in_to_every_host(three_hosts: Cluster, user: str) -> None:
    names = [host.name for host in three_hosts.hosts]
    assert names == ["node0", "node1", "node2"]
    for host in three_hosts.hosts:
        for name in names:
            there = host.run(["ssh", name, "hostname; whoami"], user=user)
            assert there.stdout.split() == [name, user], there.stderr


def test_a_login_has_a_plain_environment(three_hosts: Cluster) -> None:
    there = three_hosts["node0"].run(["ssh", "node1", "echo $PATH $VIRTUAL_ENV; pwd"])
    path, home = three_hosts["node1"].run(["sh", "-c", "echo $PATH; echo $HOME"]).stdout.split()
    assert there.stdout.split() == [path, home]
    assert os.fspath(MPIRUN.parent) not in path


def test_mpirun_starts_ranks_on_all_hosts(three_hosts: Cluster) -> None:
    fast = ["--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp"]
    hosts = ["-np", "3", "-H", "node0,node1,node2", "--allow-run-as-root"]
    node0 = three_hosts["node0"]
    ranks = node0.run([MPIRUN, *fast, *hosts, "hostname"])
    assert sorted(ranks.stdout.split()) == ["node0", "node1", "node2"], ranks.stderr


def test_hosts_share_files_except_their_private_folders(three_hosts: Cluster) -> None:
    node0, node1 = three_hosts["node0"], three_hosts["node1"]
    file = three_hosts.shared / "file"
    node0.run(["tee", file], user=USER, stdin="seen by all", check=True)
    assert file.read_text() == "seen by all"
    assert node1.run(["cat", file]).stdout == "seen by all"
    for own in ("/etc/own", "/run/own", "/run/tmp/own", "/dev/shm/own", node0.home() + "/own"):
        node0.run(["touch", own], check=True)
        assert node0.path(own).exists()
        assert not node1.path(own).exists()
        assert not Path(own).exists()


def test_a_user_without_root_can_use_python_and_the_repository(three_hosts: Cluster) -> None:
    command = [sys.executable, "-c", "import tests.support.cluster, mpi4py; print('ok')"]
    there = three_hosts["node1"].run(command, user=USER, cwd=REPOSITORY)
    assert there.stdout == "ok\n", there.stderr


def test_a_program_gets_signals_and_returns_its_exit_code(three_hosts: Cluster) -> None:
    node2 = three_hosts["node2"]
    with node2.popen(["sh", "-c", "trap 'exit 7' INT; sleep 6000 & echo set; wait"]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "set\n"
        program.send_signal(signal.SIGINT)
        assert program.wait(PATIENCE_S) == 7
    assert len(node2.kill_processes()) == 1  # the sleep
    with pytest.raises(subprocess.TimeoutExpired):
        node2.run(["sh", "-c", "sleep 6000 & sleep 6000"], timeout_s=0.2)
    assert node2.processes() == []


def test_odd_hosts(odd_hosts: Cluster) -> None:
    node0, node1 = odd_hosts.hosts
    assert node0.run(["getent", "ahostsv4", "node0"]).stdout.split()[0] == "127.0.1.1"
    assert node0.run(["getent", "ahostsv4", "node1"]).stdout.split()[0] == node1.address
    assert (node0.interface, node1.interface) == ("eth0", "ens5")
    for host in odd_hosts.hosts:
        lines = host.run(["ip", "-br", "-4", "address"]).stdout.splitlines()
        addresses = {line.split("@")[0].split()[0]: line.split()[2] for line in lines}
        assert addresses.keys() == {"lo", host.interface, "eth1", "docker0", "virbr0"}
        assert addresses["docker0"] == "172.17.0.1/16"
        assert addresses[host.interface] == f"{host.address}/24"
        assert host.run(["ssh", "node0", "hostname"]).stdout == "node0\n"
    dead = node1.address.replace("10.77.", "10.78.")
    assert node0.run([*SSH_WITH_TIMEOUT, dead, "true"]).returncode == 255


BROKEN = {
    "no_sshd": ("Connection refused",),
    "unknown_key": ("Host key verification failed.",),
    "key_refused": ("Permission denied (publickey).",),
    "login_fails": ("This account is currently not available.",),
    "unreachable": ("Connection timed out", "No route to host"),  # whichever times out first
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_breaks_ssh_until_the_end_of_its_block(three_hosts: Cluster, fault: str) -> None:
    node0, node1 = three_hosts["node0"], three_hosts["node1"]
    breaks: dict[str, AbstractContextManager[None]] = {
        "no_sshd": faults.no_sshd(node1),
        "unknown_key": faults.unknown_key(three_hosts, node1),
        "key_refused": faults.key_refused(node1),
        "login_fails": faults.login_fails(node1),
        "unreachable": faults.unreachable(node1),
    }
    ssh = SSH_WITH_TIMEOUT if fault == "unreachable" else ("ssh",)
    with breaks[fault]:
        broken = node0.run([*ssh, "node1", "hostname"])
        assert broken.returncode != 0
        output = broken.stdout + broken.stderr
        assert any(message in output for message in BROKEN[fault]), output
        assert node0.run(["ssh", "node2", "hostname"]).stdout == "node2\n"
    assert node0.run(["ssh", "node1", "hostname"]).stdout == "node1\n"


RECEIVE = """
import socket
server = socket.create_server(("", 5005))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""
SEND = """
import socket
connection = socket.create_connection(("node1", 5005))
while True:
    connection.sendall(bytes(1 << 16))
"""


@pytest.mark.parametrize("slow", ["node0", "node1"])
def test_a_limited_link_carries_no_more_than_its_rate(three_hosts: Cluster, slow: str) -> None:
    """The kernel's counter of the interface, while node0 sends to node1 as fast as it can."""
    node0, node1 = three_hosts["node0"], three_hosts["node1"]
    mbit, counter = 8, {"node0": "tx_bytes", "node1": "rx_bytes"}[slow]
    file = three_hosts[slow].path(f"/sys/class/net/eth0/statistics/{counter}")

    def wait_for(num_bytes: int) -> int:
        start = time.monotonic()
        while (found := int(file.read_text())) < num_bytes:
            assert time.monotonic() < start + PATIENCE_S
            time.sleep(0.02)
        return found

    with links.limited([three_hosts[slow]], mbit=mbit):
        with node1.popen([sys.executable, "-c", RECEIVE]) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            with node0.popen([sys.executable, "-c", SEND]) as sender:
                wait_for(int(file.read_text()) + 2 * links.burst_bytes(mbit))  # the bucket is empty
                begin_s, begin = time.monotonic(), int(file.read_text())
                sent = wait_for(begin + 2_000_000) - begin
                seconds = time.monotonic() - begin_s
                sender.end()
            receiver.end()
        assert sent <= mbit * 1e6 / 8 * seconds + links.burst_bytes(mbit)
    for host in three_hosts.hosts:
        assert "tbf" not in host.run(["tc", "qdisc", "show"], check=True).stdout


SPIN = """
import time
wall, used = time.monotonic(), time.process_time()
while time.monotonic() < wall + 2:
    pass
print((time.process_time() - used) / (time.monotonic() - wall))
"""


def test_a_limited_host_computes_no_more_than_its_share(three_hosts: Cluster) -> None:
    if reason := cpus.why_not():
        pytest.skip(reason)
    node0, node1 = three_hosts["node0"], three_hosts["node1"]
    spin = [sys.executable, "-c", SPIN]
    with cpus.limited(node0, 0.2):
        from_here = node0.run(cpus.within(node0, spin), check=True)
        by_ssh = node1.run(["ssh", "node0", shlex.join(spin)], check=True)
    assert float(from_here.stdout) < 0.3
    assert float(by_ssh.stdout) < 0.3
    assert not list(Path("/sys/fs/cgroup/cpu").glob(f"mpiddp-host-{node0.pid}"))
    assert node0.run(["hostname"]).stdout == "node0\n"  # nothing stays limited or ends


def test_nothing_is_left_behind() -> None:
    links = set(Path("/sys/class/net").iterdir())
    with cluster.up_or_skip(2) as standing:
        standing["node0"].popen(["ssh", "node1", "sleep 300"])
        folder = state.STATE / standing.name
        pids = [identity(host.pid) for host in standing.hosts]
        pids.append(identity(standing.hosts[0].hub_pid))
        assert folder.exists()
        assert all(is_running(*pid) for pid in pids)
    assert not folder.exists()
    wait_until_ended(pids)
    assert set(Path("/sys/class/net").iterdir()) == links
    assert f"{USER}:" not in Path("/etc/passwd").read_text()


def test_the_hosts_of_a_killed_process_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Use another folder, because any other test that starts a cluster would remove this one.
    monkeypatch.setattr(state, "STATE", Path(f"/run/mpiddp-cluster-{os.getpid()}"))
    monkeypatch.setenv("MPIDDP_TEST_CLUSTERS", str(state.STATE))
    if reason := cluster.why_not():
        pytest.skip(reason)
    name = f"killed-{os.getpid()}"
    script = (
        "import sys, time; from tests.support import cluster\n"
        "with cluster.up(2, name=sys.argv[1]) as c:\n"
        "    print(*(host.pid for host in c.hosts), flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as maker:
        assert maker.stdout is not None
        pids = [identity(int(pid)) for pid in maker.stdout.readline().split()]
        assert [is_running(*pid) for pid in pids] == [True, True]
        maker.kill()
    wait_until_ended(pids)
    assert name in cluster.standing()
    with cluster.up(1):  # removes clusters of ended processes
        assert name not in cluster.standing()
    assert not state.STATE.exists()


def wait_until_ended(pids: list[Identity]) -> None:
    """Wait until the processes have ended; zombies count as ended."""
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(*pid) for pid in pids):
        assert time.monotonic() < deadline, "some hosts still run"
        time.sleep(0.01)
