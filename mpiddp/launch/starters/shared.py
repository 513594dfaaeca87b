"""Reasons and files that the command lines of several MPIs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath

from mpiddp.hosts.nodes import Node
from mpiddp.launch.starters.command import Request

BINDINGS = {
    "none": "a rank's data loading needs more than the one core that MPI would give it",
    "numa": "--bind numa: a rank keeps to the cores and the memory of one NUMA node",
    "core": "--bind core: a rank keeps to one core",
}
WDIR = "the same working folder on every host"
EXPORT = "these variables reach the ranks on other hosts, by name: no value is shown to `ps`"
NETWORK = "the network that the hosts share, for not every one of a host's leads to the others"
SSH_CONFIG = "the users and ports that the hostfile names, before your own ssh settings"


def ssh_config(request: Request) -> dict[str, str]:
    """The file that tells ssh of users and ports, which no MPI's command line has room for."""
    special = [node for node in request.nodes if node.user or node.port]
    if not special:
        return {}
    lines = [line for node in special for line in _ssh_host(node)]
    lines += ["Host *", "  Include ~/.ssh/config", "  Include /etc/ssh/ssh_config"]
    return {str(PurePath(request.scratch, "mpiddp-ssh_config")): "\n".join(lines) + "\n"}


def ssh_arguments(files: Mapping[str, str]) -> str:
    return f"-F {next(iter(files))}"


def _ssh_host(node: Node) -> Iterable[str]:
    yield f"Host {node.name}"
    if node.user:
        yield f"  User {node.user}"
    if node.port:
        yield f"  Port {node.port}"
