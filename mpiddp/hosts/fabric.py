"""What a host's network is made of: links, RDMA devices, and the choice of each library among them.

`mpiddp hosts check --network` sends this source to the hosts, after that of interfaces.py. It needs
Python 3.8 and the standard library.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from mpiddp.hosts.interfaces import Interface, interfaces

# NCCL's own order without NCCL_SOCKET_IFNAME: interfaces of InfiniBand, others, bridges, the loopback.
_BRIDGES = ("docker", "virbr")


def facts(names: list[str], root: str = "/sys") -> dict[str, Any]:
    """The links, the devices and the choices of this host, as JSON. `names`: the hosts of the job."""
    present, found = interfaces(), devices(root)
    return {
        "links": links(present, root),
        "devices": found,
        "nccl": nccl_choice([each.name for each in present], found),
        "gloo": gloo_choice(present),
        "mpiddp": leading_to(names, present),
    }


def links(present: list[Interface], root: str) -> list[dict[str, Any]]:
    """Each interface but the loopback: its address, Mbit/s, MTU and state. None for what is not known."""
    addresses = {each.name: each.address for each in present}
    folder = os.path.join(root, "class", "net")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [
        {
            "name": name,
            "address": addresses.get(name),
            "speed": _number(os.path.join(folder, name, "speed")),
            "mtu": _number(os.path.join(folder, name, "mtu")),
            "state": _text(os.path.join(folder, name, "operstate")),
        }
        for name in names
        if name != "lo" and os.path.isdir(os.path.join(folder, name))
    ]


def devices(root: str) -> list[dict[str, Any]]:
    """Each port of an RDMA device. Its kind is InfiniBand, or RoCE where its link is Ethernet."""
    folder = os.path.join(root, "class", "infiniband")
    found = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        ports = os.path.join(folder, name, "ports")
        for port in sorted(os.listdir(ports)) if os.path.isdir(ports) else []:
            path = os.path.join(ports, port)
            layer = _text(os.path.join(path, "link_layer"))
            found.append(
                {
                    "name": f"{name}:{port}",
                    "kind": "RoCE" if layer == "Ethernet" else "InfiniBand",
                    "rate": _text(os.path.join(path, "rate")),
                    "state": _text(os.path.join(path, "state")).rpartition(" ")[2],  # "4: ACTIVE"
                    "interface": _text(os.path.join(path, "gid_attrs", "ndevs", "0")),
                }
            )
    return found


def nccl_choice(names: list[str], found: list[dict[str, Any]]) -> str:
    """What NCCL sends tensors over by itself: active RDMA devices, else the first of its interfaces."""
    active = [each["name"] for each in found if each["state"] == "ACTIVE"]
    if active:
        return ", ".join(active)

    def rank(name: str) -> int:
        if name.startswith("ib"):
            return 0
        return 3 if name == "lo" else 2 if name.startswith(_BRIDGES) else 1

    return min(names, key=rank, default="nothing")


def gloo_choice(present: list[Interface]) -> str:
    """The interface with the address of this host's own name, which gloo takes; "lo" if it has none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        return "lo"
    own = {each.address: each.name for each in present}
    return next((own[entry[4][0]] for entry in found if entry[4][0] in own), "lo")


def leading_to(names: list[str], present: list[Interface]) -> str:
    """The interfaces of this host on the way to the others. Nothing is sent."""
    own = {each.address: each.name for each in present if not each.is_loopback}
    found: dict[str, None] = {}
    for name in names:
        try:
            entries = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
            family, _, _, _, address = entries[0]
            with socket.socket(family, socket.SOCK_DGRAM) as packet:
                packet.connect(address)
                if (source := packet.getsockname()[0]) in own and source != address[0]:
                    found[own[source]] = None
        except OSError:  # no such name here, or no route
            continue
    return ", ".join(found) or "nothing"


def _text(path: str) -> str:
    """The line of a file of sysfs, "" where it cannot be read: the speed of a link that is down."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None  # -1: not known
