"""Reasons and files that the command lines of several MPIs share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from mpiddp.hosts.nodes import Node
from mpiddp.launch.starters.command import Request

BINDINGS = {
    "none": "no binding: MPI would give each rank one core, and data loading needs more",
    "numa": "--bind numa: each rank uses the cores and the memory of one NUMA node",
    "core": "--bind core: each rank uses one core",
}
SHIELD = "env --ignore-signal=TERM"  # GNU coreutils 8.31
LONGEST_ARGUMENT = 100_000  # characters; Linux allows 128 KiB
WDIR = "the same working folder on every host"
EXPORT = "passes these variables to the ranks on other hosts, by name, so that `ps` shows no value"
EXPORT_ONLY = "passes only these variables to the ranks, by name, so that `ps` shows no value"
NETWORK = "the network that connects the hosts; not every network of a host does"
DETECTION = (
    "the hosts, and the way to them, are those of this command; mpirun would follow {schedulers}"
)
SSH_CONFIG = "the users and ports of the hostfile; they take precedence over your ssh settings"


def host_file(request: Request, text: str, lines: Iterable[str]) -> dict[str, str]:
    """A file of these lines, if `text` is too long for an argument; else none."""
    if len(text) <= LONGEST_ARGUMENT:
        return {}
    return {str(PurePath(request.scratch, "mpiddp-hosts")): "".join(f"{line}\n" for line in lines)}


def can_shield() -> bool:
    """Whether this machine's env(1) can start a program that ignores SIGTERM."""
    try:
        return subprocess.run([*SHIELD.split(), "true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def ssh_config(request: Request) -> dict[str, str]:
    """The file that gives ssh the users and ports. No MPI has a command-line option for them."""
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
