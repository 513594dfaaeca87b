"""How many GPUs the hosts have: the slots of a host that names none, and the most that it can use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.nodes import is_this_host
from mpiddp.hosts.ssh import require_ssh, ssh_to

NVIDIA_SMI_TIMEOUT_S = 20.0  # without persistence mode it wakes eight GPUs in ten seconds or so


def count_gpus(host: Host, env: Mapping[str, str] = os.environ) -> int:
    """The GPUs that ranks on `host` can use, 0 where there is no nvidia-smi. Asks over ssh.

    Raises:
        UserError: ssh does not get there, or nvidia-smi hangs.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return 0
    if is_this_host(host.name):
        program = shutil.which("nvidia-smi", path=env.get("PATH"))
        if program is None:
            return 0
        command = [program, "-L"]
    else:
        require_ssh()
        command = [*ssh_to(host), "nvidia-smi", "-L"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        raise UserError(no_nvidia_smi(host.name)) from None
    if command[0] == "ssh" and done.returncode == 255:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1].rstrip(".")
        raise UserError(
            f"ssh {host.name}, to count its GPUs: {reason}. Mend the login, or write its slots."
        )
    return usable(sum(line.startswith("GPU ") for line in done.stdout.splitlines()), env)


def no_nvidia_smi(name: str) -> str:
    """The sentence for a host where it does not answer: nor would NCCL."""
    return (
        f"{name}: nvidia-smi is there and does not answer. Mend the driver, or set "
        "CUDA_VISIBLE_DEVICES= to go without GPUs."
    )


def usable(installed: int, env: Mapping[str, str]) -> int:
    """How many of a host's GPUs CUDA_VISIBLE_DEVICES leaves, which the ranks get from here."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    return 0 if visible in ("", "-1") else min(installed, len(visible.split(",")))


def fit_to_gpus(
    hosts: Hosts,
    backend: str | None,
    count: Callable[[Host], int] = count_gpus,
    asked: Collection[Host] = (),
) -> tuple[Hosts, list[str]]:
    """`hosts` with every slot count known, and sentences about what the user would not expect.

    A bare host gets a slot per GPU, or one without GPUs. A host has no more slots than GPUs, for
    ranks that share one stop NCCL; without any GPU its slots stay as they are written.

    Args:
        backend: what the job asks for; "auto" is nccl on GPUs, None is not known. Ranks over gloo need
            no GPU of their own.
        asked: the hosts whose GPUs are known without asking once more.

    Raises:
        UserError: fewer GPUs than slots. This machine alone gets fewer ranks instead, unless the job
            asks for nccl; of other hosts there is only a note where the backend is not known.
    """
    notes: list[str] = []
    fitted: list[Host] = []
    for host in hosts.hosts:
        slots = host.slots
        is_alone = len(hosts.hosts) == 1 and is_this_host(host.name)
        is_known = is_alone or host in asked
        if slots is None:
            slots = min(count(host) or 1, host.max_slots or sys.maxsize)
        elif backend != "gloo" and slots > 1 and is_known and 0 < (gpus := count(host)) < slots:
            found = f"{host.name} has {gpus} GPU{'' if gpus == 1 else 's'} but {slots} slots"
            if is_alone and backend == "nccl":
                raise UserError(
                    f"{hosts.where(host)}: {found}: ranks would share GPUs. Write slots={gpus}, "
                    "or leave out --backend nccl."
                )
            if is_alone:
                notes.append(f"{found}: starting {gpus} rank{'' if gpus == 1 else 's'} there")
                slots = gpus
            elif backend is not None:
                raise UserError(f"{found}: ranks would share GPUs.")
            else:
                notes.append(f"{found}: ranks that use GPUs would share them, which NCCL refuses")
        fitted.append(replace(host, slots=slots))
    return replace(hosts, hosts=tuple(fitted)), notes
