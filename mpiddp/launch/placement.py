"""On which hosts how many ranks start: the user's hosts, with the open slot counts filled in.

A host without a slot count takes one rank per GPU, or one rank where there is no GPU.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from mpiddp.errors import UserError
from mpiddp.hostfile import Host, Hosts
from mpiddp.launch.command import Node


@cache
def is_this_host(name: str) -> bool:
    """Whether `name` is the machine that this process runs on."""
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    """Only a machine's own addresses can be bound to, and nothing is sent to find out."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def count_gpus(host: str, env: Mapping[str, str] = os.environ) -> int:
    """The GPUs that ranks on `host` can use; only this machine can be asked so far.

    CUDA_VISIBLE_DEVICES, which the ranks inherit, narrows them down.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if not is_this_host(host) or program is None or visible in ("", "-1"):
        return 0
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30).stdout
    installed = sum(line.startswith("GPU ") for line in listing.splitlines())
    return installed if visible is None else min(installed, len(visible.split(",")))


def this_machine() -> Hosts:
    """The hosts of a launch that names none."""
    return Hosts("this machine", (Host("localhost"),))


def fit_to_gpus(hosts: Hosts, backend: str | None) -> tuple[Hosts, list[str]]:
    """`hosts` with every slot count filled in, and what the user is to be told about it.

    Fewer GPUs than slots means as many ranks as GPUs, for ranks that shared one would stop NCCL. On a
    machine without GPUs the slots stay as written.

    Raises:
        UserError: fewer GPUs than slots, and the script's arguments insist on nccl.
    """
    notes: list[str] = []
    fitted: list[Host] = []
    for host in hosts.hosts:
        if host.slots is not None and not is_this_host(host.name):
            fitted.append(host)
            continue
        gpus = count_gpus(host.name)
        slots = (gpus or 1) if host.slots is None else host.slots
        if 0 < gpus < slots:
            if backend == "nccl":
                raise UserError(
                    f"{hosts.where(host)}: {host.name} has {_count(gpus, 'GPU')} but {slots} slots: "
                    f"ranks would share GPUs. Write slots={gpus}, or leave --backend nccl out."
                )
            notes.append(
                f"{host.name} has {_count(gpus, 'GPU')} for its {slots} slots: starting "
                f"{_count(gpus, 'rank')} there"
            )
            slots = gpus
        fitted.append(replace(host, slots=slots))
    return replace(hosts, hosts=tuple(fitted)), notes


def name_nodes(placed: Sequence[tuple[Host, int]], *, own_name: bool) -> tuple[Node, ...]:
    """The hosts as mpirun is to be told of them; with `own_name`, this machine by its own name.

    That is how every mpirun knows that it stands on that host, and never asks for it over ssh.

    Raises:
        UserError: two of the hosts are this machine.
    """
    nodes: list[Node] = []
    here: Host | None = None
    for host, ranks in placed:
        if not (own_name and is_this_host(host.name)):
            nodes.append(Node(host.name, ranks, host.user, host.port))
            continue
        if here is not None:
            raise UserError(
                f"{here.name} and {host.name} are both this machine. Merge them into one."
            )
        here = host
        nodes.append(Node(socket.gethostname(), ranks))
    return tuple(nodes)


def report(nodes: Sequence[Node]) -> list[str]:
    """A line for each host with the ranks that it takes."""
    lines, first = [], 0
    for node in nodes:
        last = first + node.ranks - 1
        ranks = f"rank {first}" if node.ranks == 1 else f"ranks {first}-{last}"
        lines.append(f"{node.name}: {ranks}")
        first = last + 1
    return lines


def asked_backend(arguments: Sequence[str]) -> str | None:
    """The value of --backend among the script's arguments, None when it is not there."""
    for position, argument in enumerate(arguments):
        if argument == "--backend" and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith("--backend="):
            return argument.partition("=")[2]
    return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
