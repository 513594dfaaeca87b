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

from mpiddp.errors import UserError
from mpiddp.hostfile import Host, Hosts


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


def this_machine(gpus: int) -> Hosts:
    """The hosts of a launch that names none: this machine, one rank per GPU."""
    return Hosts("this machine", (Host("localhost", slots=gpus or 1),))


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
