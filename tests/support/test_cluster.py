"""The test cluster has separate hosts with ssh between them, and leaves nothing behind."""

from pathlib import Path

from tests.support import cluster
from tests.support.cluster import USER, Layout, faults


def test_a_cluster() -> None:
    """Logins, private files, a fault for the time of a block, 127.0.1.1, and an end without leftovers."""
    links = set(Path("/sys/class/net").iterdir())
    with cluster.up_or_skip(2, layout=Layout(own_name_is_loopback=True)) as hosts:
        node0, node1 = hosts.hosts
        for user in ("root", USER):
            there = node0.run(["ssh", "node1", "hostname; whoami"], user=user)
            assert there.stdout.split() == ["node1", user], there.stderr
        for file in ("/etc/own", "/run/tmp/own", "/dev/shm/own", f"{node0.home()}/own"):
            node0.run(["touch", file], check=True)
            assert not node1.path(file).exists()
            assert not Path(file).exists()
        assert node0.run(["getent", "ahostsv4", "node0"]).stdout.startswith("127.0.1.1")
        with faults.no_sshd(node1):
            assert "refused" in node0.run(["ssh", "node1", "hostname"]).stderr
        node1.popen(["ssh", "node0", "sleep 6000"])
    assert not hosts.shared.exists()
    assert not any(Path("/proc", str(host.pid)).exists() for host in hosts.hosts)
    assert set(Path("/sys/class/net").iterdir()) == links
