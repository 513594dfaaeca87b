"""Reasons and files that the command lines of several MPIs share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import PurePath

from mpiddp.hosts.hostfile import Host
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


# What each kind of option of --mpi-args would contradict, and what to write instead.
_INSTEAD = {
    "hosts": "the hosts of the job. Write: mpiddp launch --hostfile FILE, -H or --exclude",
    "counts": "the number of ranks. Write: mpiddp launch -n N or --npernode K",
    "mapping": "the order of the ranks, which is the hostfile's. Leave it out",
    "binding": "--bind. Write: mpiddp launch --bind numa or --bind core",
    "variables": "the variables of the ranks. Write: mpiddp launch -x VAR or --env-file FILE",
    "folder": "the working folder of the ranks, which is this one. Leave it out",
    "agent": "the way to the other hosts. Put options of ssh into ~/.ssh/config",
    "network": "the network of the job. Write: mpiddp launch --interface NAME",
    "program": "the program of the ranks. Leave it out",
    "supervision": "the supervision of the ranks. Leave it out",
}


def refusals(**options: str) -> dict[str, str]:
    """The options of a starter that contradict the launcher's, by kind, each with what to write instead."""
    return {name: _INSTEAD[kind] for kind, names in options.items() for name in names.split()}


def host_file(request: Request, text: str, lines: Iterable[str]) -> dict[str, str]:
    """A file of these lines, if `text` is too long for an argument; else none."""
    if len(text) <= LONGEST_ARGUMENT:
        return {}
    return {str(PurePath(request.scratch, "mpiddp-hosts")): "".join(f"{line}\n" for line in lines)}


@cache
def can_shield() -> bool:
    """Whether this machine's env(1) can start a program that ignores SIGTERM."""
    try:
        return subprocess.run([*SHIELD.split(), "true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def ssh_config(request: Request) -> dict[str, str]:
    """The file that gives ssh the users and ports. No MPI has a command-line option for them."""
    special = [host for host in request.hosts.hosts if host.user or host.port]
    if not special:
        return {}
    lines = [line for host in special for line in _ssh_host(host)]
    lines += ["Host *", "  Include ~/.ssh/config", "  Include /etc/ssh/ssh_config"]
    return {str(PurePath(request.scratch, "mpiddp-ssh_config")): "\n".join(lines) + "\n"}


def ssh_arguments(files: Mapping[str, str]) -> str:
    return f"-F {next(iter(files))}"


def _ssh_host(host: Host) -> Iterable[str]:
    yield f"Host {host.name}"
    if host.user:
        yield f"  User {host.user}"
    if host.port:
        yield f"  Port {host.port}"
