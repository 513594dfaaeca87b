"""Count the GPUs of the hosts: the default and the upper bound of a host's slots."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts import gpu_tools
from mpiddp.hosts.gpu_variables import VISIBLE, hides_all_gpus
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.nodes import is_this_host
from mpiddp.hosts.ssh import CONNECT_TIMEOUT_S, NO_PROGRAM, run_on_hosts
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import counted, shown

_TIMEOUT_S = CONNECT_TIMEOUT_S + gpu_tools.TIMEOUT_S


def count_gpus(host: Host, env: Mapping[str, str] = os.environ, transport: Transport = SSH) -> int:
    """The number of GPUs that ranks on `host` can use, 0 without its vendor's tool.

    Another host counts its own: the transport runs the same Python there.

    Args:
        env: the variables of the ranks on this host, see `gpu_choice.variables_of_ranks`.

    Raises:
        UserError: the transport fails, Python is missing there, the vendor's tool hangs, or the hostfile
            names a GPU that the host does not have.
    """
    if hides_all_gpus(env):
        return 0
    is_here = is_this_host(host.name)
    names = gpu_tools.gpu_names(env.get("PATH")) if is_here else _names_over(transport, host)
    if names is None:
        raise UserError(no_answer_of_gpus(host.name))
    return usable(host, len(names), env)


def _names_over(transport: Transport, host: Host) -> list[str] | None:
    """`gpu_names` on another host."""
    python = str(Path(sys.executable).absolute())
    source = Path(gpu_tools.__file__).read_text()
    program = f"{source}\nimport json\nprint(json.dumps(gpu_names()))\n"
    answer = run_on_hosts([host], python, program, timeout_s=_TIMEOUT_S, transport=transport)[host]
    if answer.exit_code == 0:
        # The start-up files of the remote shell may print something first.
        last = answer.stdout.splitlines()[-1:]
        with contextlib.suppress(ValueError, RecursionError):
            names = json.loads(last[0]) if last else ""
            if names is None or isinstance(names, list):
                return names
        raise UserError(
            f"{transport.name} {host.name}: cannot count its GPUs: its last line is "
            f'"{shown("".join(last))}". '
            f"Silence the start-up files of its shell, or write: {host.name} slots=N"
        )
    if answer.exit_code == NO_PROGRAM:
        raise UserError(no_python(host.name, python))
    no_answer = [f"no answer in {_TIMEOUT_S:g} s" if answer.exit_code is None else "no answer"]
    reason = (answer.stderr.strip().splitlines() or no_answer)[-1].rstrip(".")
    raise UserError(
        f"{transport.name} {host.name}: cannot count its GPUs: {reason}. "
        f"Fix the login, or write: {host.name} slots=N"
    )


def no_python(name: str, python: str) -> str:
    """The error for a host without the Python that every rank needs."""
    return f"{name}: {python} is missing. Install it at the same path on every host."


def no_answer_of_gpus(name: str) -> str:
    """The error for a host whose GPUs do not answer. NCCL would not work there either."""
    return (
        f"{name}: nvidia-smi (amd-smi, xpu-smi) does not answer. Repair the driver, or set "
        "CUDA_VISIBLE_DEVICES= to run without GPUs."
    )


def usable(host: Host, installed: int | None, env: Mapping[str, str]) -> int:
    """The number of a host's GPUs that its hostfile entry, or else the variables of its ranks, leave visible.

    Args:
        installed: None if the vendor's tool does not answer, which matters only for a job that uses GPUs.

    Raises:
        UserError: the hostfile names a GPU that the host does not have.
    """
    if hides_all_gpus(env) or installed is None:
        return 0
    if host.gpus is not None:
        if missing := [number for number in host.gpus if number >= installed]:
            raise UserError(
                f"{host.name} has {counted(installed, 'GPU')}, so there is no GPU {missing[0]} "
                f"(gpus={','.join(map(str, host.gpus))}). They are numbered from 0."
            )
        return len(host.gpus)
    chosen = [len(env[name].split(",")) for name in VISIBLE if name in env]
    return min([installed, *chosen])


def fit_to_gpus(
    hosts: Hosts,
    backend: str | None,
    count: Callable[[Host], int] = count_gpus,
    known: Collection[Host] = (),
    *,
    are_granted: bool = False,
) -> tuple[Hosts, list[str]]:
    """`hosts` with every slot count known, and notes about counts that the user may not expect.

    A host without a slot count gets one slot per GPU, or 1 without GPUs. A host gets no more slots than
    GPUs, because NCCL fails if ranks share one. Without any GPU its slots stay as written.

    Args:
        backend: the one that the job requests. "auto" is nccl on GPUs; None is unknown. With gloo a rank
            needs no GPU of its own.
        known: the hosts whose GPUs `count` knows without ssh.
        are_granted: a scheduler has counted the slots, which may be cores. A host with fewer GPUs starts
            fewer ranks instead, with a note.

    Raises:
        UserError: a host has fewer GPUs than slots. A job on this machine alone starts fewer ranks
            instead, with a note, unless it requests nccl. If the backend is unknown, other hosts get a
            note.
    """
    notes: list[str] = []
    fitted: list[Host] = []
    for host in hosts.hosts:
        slots = host.slots
        is_alone = len(hosts.hosts) == 1 and is_this_host(host.name)
        is_known = is_alone or host in known
        if slots is None:
            slots = min(count(host) or 1, host.max_slots or sys.maxsize)
        elif backend != "gloo" and slots > 1 and is_known and 0 < (gpus := count(host)) < slots:
            found = f"{host.name} has {counted(gpus, 'GPU')} but {slots} slots"
            if is_alone and backend == "nccl" and not are_granted:
                raise UserError(
                    f"{hosts.where(host)}: {found}: ranks would share GPUs. Write slots={gpus}, "
                    "or leave out --backend nccl."
                )
            if is_alone or are_granted:
                notes.append(f"{found}: starting only {counted(gpus, 'rank')} there")
                slots = gpus
            elif backend is not None:
                raise UserError(f"{found}: ranks would share GPUs.")
            else:
                notes.append(f"{found}: ranks that use GPUs would share them, which NCCL refuses")
        fitted.append(replace(host, slots=slots))
    return replace(hosts, hosts=tuple(fitted)), notes
