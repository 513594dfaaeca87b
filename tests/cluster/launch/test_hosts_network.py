"""`mpiddp hosts check --network`, on hosts with other names and sizes of links, and with bridges.

Tests mpiddp/hosts/fabric.py and mpiddp/hosts/cluster/network.py.
python -m pytest tests/cluster/launch/test_hosts_network.py
"""

from __future__ import annotations

import re
import sys

from tests.support import cluster
from tests.support.cluster import Layout, faults
from tests.support.errors import error
from tests.support.ranks import ROOT

CHECK = [sys.executable, "-m", "mpiddp", "hosts", "check", "--network"]


def test_links_of_the_hosts() -> None:
    layout = Layout(
        interfaces=("eth0", "eth0", "ens5"),
        own_name_is_loopback=True,
        decoys=("docker0",),
        apart=True,
    )
    with cluster.up_or_skip(3, layout=layout) as hosts:
        file = hosts.shared / "hosts"
        file.write_text("node0\nnode1\nnode2\n")
        hosts["node1"].run(["ip", "link", "set", "eth0", "mtu", "9000"], check=True)
        done = hosts["node0"].run([*CHECK, str(file)], cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()[5:]]
        assert "node0 eth0 10.77.0.1 10 Gbit/s 1500 up" in lines
        assert "node1 docker0 172.17.0.1 10 Gbit/s 1500 up" in lines
        assert lines[-5:] == [
            "node[0-1]: NCCL would take eth0, gloo lo; mpiddp sets eth0",
            "node2: NCCL would take ens5, gloo lo; mpiddp sets ens5",
            "differs: eth0, MTU: 1500 on node0, 9000 on node1",
            "differs: eth0, state: up on node[0-1], missing on node2",
            "differs: ens5, state: missing on node[0-1], up on node2",
        ]
        with faults.no_sshd(hosts["node2"]):
            done = hosts["node0"].run([*CHECK, str(file)], cwd=ROOT)
        assert done.returncode == 2
        assert re.match(error("connection refused", "ssh node2: "), done.stderr), done.stderr
