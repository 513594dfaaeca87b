"""What `mpiddp hosts check --network` reads from sysfs, and how it compares the hosts.

Tests mpiddp/hosts/fabric.py and mpiddp/hosts/cluster/network.py.
python -m pytest tests/unit/hosts/test_fabric.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.cluster import network
from mpiddp.hosts.cluster.network import ask, differences, report
from mpiddp.hosts.fabric import devices, links, nccl_choice
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from tests.support.errors import error


def put(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "class" / name).write_text(f"{text}\n")
    return str(root)


PORTS = {
    "infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "infiniband/mlx5_1/ports/1/link_layer": "Ethernet",
    "infiniband/mlx5_1/ports/1/rate": "100 Gb/sec (4X EDR)",
    "infiniband/mlx5_1/ports/1/state": "1: DOWN",
    "infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0": "ens2",
}


def test_links_of_a_host(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "net/bonding_masters": "",  # a file among the folders
            "net/lo/mtu": "65536",
            "net/eth0/mtu": "9000",
            "net/eth0/speed": "25000",
            "net/eth0/operstate": "up",
            "net/eth1/speed": "-1",
        },
    )
    eth0 = {"name": "eth0", "address": "10.0.0.1", "speed": 25000, "mtu": 9000, "state": "up"}
    eth1 = {"name": "eth1", "address": None, "speed": None, "mtu": None, "state": ""}
    assert links([Interface("eth0", "10.0.0.1", "10.0.0.0/24")], root) == [eth0, eth1]
    assert links([], str(tmp_path / "none")) == []


def test_devices_of_a_host(tmp_path: Path) -> None:
    found = devices(put(tmp_path, PORTS))
    assert [each["name"] for each in found] == ["mlx5_0:1", "mlx5_1:1"]
    assert [each["kind"] for each in found] == ["InfiniBand", "RoCE"]
    assert [each["state"] for each in found] == ["ACTIVE", "DOWN"]
    assert [each["interface"] for each in found] == ["", "ens2"]
    assert devices(str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("names", "choice"),
    [
        (["lo", "docker0", "eth0", "eth1"], "eth0"),
        (["lo", "eth0", "ib0"], "ib0"),
        (["lo", "docker0"], "docker0"),
        (["virbr0", "eth0"], "eth0"),
        (["lo"], "lo"),
        ([], "nothing"),
    ],
)
def test_what_nccl_takes_by_itself(names: list[str], choice: str) -> None:
    assert nccl_choice(names, [{"name": "mlx5_0:1", "state": "DOWN"}]) == choice
    assert nccl_choice(names, [{"name": "mlx5_0:1", "state": "ACTIVE"}]) == "mlx5_0:1"


def facts(tmp_path: Path, name: str, files: dict[str, str]) -> dict[str, Any]:
    root = put(tmp_path / name, {"net/eth0/speed": "10000", "net/eth0/operstate": "up", **files})
    present = [Interface("eth0", "10.0.0.1", "10.0.0.0/24")]
    return {
        "links": links(present, root),
        "devices": devices(root),
        "nccl": "eth0",
        "gloo": "lo",
        "mpiddp": "eth0",
    }


def test_what_differs(tmp_path: Path) -> None:
    usual = facts(tmp_path, "usual", {"net/eth0/mtu": "9000", **PORTS})
    small = facts(tmp_path, "small", {"net/eth0/mtu": "1500", "net/docker0/mtu": "1500", **PORTS})
    down = facts(
        tmp_path,
        "down",
        {"net/eth0/mtu": "9000", **PORTS, "infiniband/mlx5_0/ports/1/state": "1: DOWN"},
    )
    without = facts(tmp_path, "without", {"net/eth0/mtu": "9000"})
    assert differences({"node1": usual, "node2": usual}) == ["nothing differs between the hosts"]
    assert differences({"node1": usual, "node2": small, "node3": usual}) == [
        "differs: eth0, MTU: 9000 on node[1,3], 1500 on node2"
    ]
    assert differences({"node1": usual, "node2": down}) == [
        "differs: mlx5_0:1, state: ACTIVE, InfiniBand on node1, DOWN, InfiniBand on node2"
    ]
    assert differences({"node1": usual, "node2": without}) == [
        "differs: mlx5_0:1, state: ACTIVE, InfiniBand on node1, missing on node2",
        "differs: mlx5_1:1, state: DOWN, RoCE on node1, missing on node2",
    ]
    assert report({"node1": usual, "node2": usual}).splitlines()[:5] == [
        "host   link      address   speed                MTU   state",
        "node1  eth0      10.0.0.1  10 Gbit/s            9000  up",
        "node1  mlx5_0:1  -         400 Gb/sec (4X NDR)  -     ACTIVE, InfiniBand",
        "node1  mlx5_1:1  ens2      100 Gb/sec (4X EDR)  -     DOWN, RoCE",
        "node2  eth0      10.0.0.1  10 Gbit/s            9000  up",
    ]
    assert (
        "node[1-2]: NCCL would take eth0, gloo lo; mpiddp sets eth0"
        in report({"node1": usual, "node2": usual}).splitlines()
    )


def test_what_is_not_known_of_a_link_is_a_dash() -> None:
    link = {"name": "eth1", "address": None, "speed": None, "mtu": None, "state": ""}
    device = {"name": "mlx5_0:1", "kind": "RoCE", "rate": "", "state": "", "interface": ""}
    choices = {"nccl": "eth1", "gloo": "lo", "mpiddp": "nothing"}
    assert report({"node1": {"links": [link], "devices": [device], **choices}}).splitlines() == [
        "host   link      address  speed  MTU  state",
        "node1  eth1      -        -      -    -",
        "node1  mlx5_0:1  -        -      -    -, RoCE",
        "node1: NCCL would take eth1, gloo lo; mpiddp sets nothing",
        "nothing differs between the hosts",
    ]


def test_each_host_is_asked_for_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = ask([Host("localhost")])
    assert found["localhost"].keys() == {"links", "devices", "nccl", "gloo", "mpiddp"}
    assert report(found).endswith("\nnothing differs between the hosts")
    python3 = tmp_path / "python3"
    python3.write_text("#!/bin/sh\necho mpiddp-network; echo worn out >&2; exit 3\n")
    python3.chmod(0o755)
    with pytest.raises(UserError) as raised:
        ask([Host("localhost"), Host("127.0.0.1")])
    failed = [
        error("failed:", f"ssh {name} ", ": worn out.", f"Try: ssh {name} true ")
        for name in ("localhost", "127.0.0.1")
    ]
    assert re.fullmatch("\n".join(failed), str(raised.value))
    python3.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(network, "_ANSWER_S", 0.3)
    late = error("no answer in", "ssh localhost: ", " 0.3 s", "Try: ssh localhost true ")
    with pytest.raises(UserError, match=rf"^{late}$"):
        ask([Host("localhost")])
    python3.rename(tmp_path / "python2")
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = error("python3 is missing there", "localhost: python3 ")
    with pytest.raises(UserError, match=rf"^{missing}$"):
        ask([Host("localhost")])
