"""The preflight: check every host before anything starts, so that a broken host causes an error, not a hang.

It contacts all hosts at once over ssh, or a scheduler's own transport, and needs only a Python 3 there. With
`--wait-for-hosts 10m` it asks those that do not answer again: the pods of a cluster start one by one, and a
name may not resolve at first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from platform import python_version
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from mpiddp.hosts import facts, files, gpu_health, gpus, interfaces, names
from mpiddp.hosts.complaints import NO_PROGRAM, Answer
from mpiddp.hosts.gpu_health import Health
from mpiddp.hosts.gpus import NO_ANSWER
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.remote import ask_hosts, program_that_prints
from mpiddp.hosts.ssh import Logins
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.launch import log
from mpiddp.text import all_of, duration, listed

PAUSE_S = 1.0  # between two attempts to reach a host
_PUSH = "Copy it there: mpiddp launch --push …, or mpiddp hosts push HOSTFILE"
_NEW_KEY = "Host key verification failed"

# The modules that are sent to the hosts, each after those that it imports. They need only a Python.
TRAVELLING: tuple[ModuleType, ...] = (interfaces, gpus, gpu_health, files, facts)


@dataclass(frozen=True)
class Needs:
    """What every host must have. It travels there as JSON. Paths are absolute."""

    python: str
    mpirun: str
    daemon: str  # the program that mpirun starts there
    folder: str
    path: str  # the PATH that the ranks will have
    interface: str | None = None  # by name, address or network
    program: str | None = None  # that the ranks run, by its path or on `path`
    script: str | None = None  # of Python, by its path
    uses_gpus: bool = True  # False with gloo, or if a variable of the ranks hides them all


@dataclass(frozen=True)
class HostInfo:
    """The probe's result for one host, see `mpiddp.hosts.facts.host_info`."""

    host: Host
    has_folder: bool
    has_daemon: bool
    has_program: bool
    mpirun: str | None  # the first line of its --version
    torch: str | None
    mpi4py: str | None
    health: Health | None  # of its GPUs; None if the vendor's tool does not answer
    interfaces: tuple[Interface, ...]
    python: str = ""  # its version
    has_script: bool = True
    address: str = ""  # of this host, to which ssh has connected
    machine: str = ""  # equal for two names of one machine; "" if it is not known


class Checked(NamedTuple):
    """What a preflight has found; nothing if none was run."""

    infos: Mapping[Host, HostInfo]  # what each host has
    complaints: Mapping[Host, str]  # why some hosts cannot be used, a sentence for each
    silent: Mapping[Host, str]  # of the complaints, those about hosts that have not answered
    health: Mapping[Host, Health] = MappingProxyType({})  # of the GPUs of each host that was asked
    notes: Mapping[Host, Sequence[str]] = MappingProxyType({})  # about GPUs that can be used


def preflight(
    hosts: Sequence[Host],
    needs: Needs,
    transport: Transport = SSH,
    *,
    wait_s: float = 0.0,
    logins: Logins | None = None,  # gets those of the hosts that answer, which remain open
) -> Checked:
    """Ask each host until it answers once, for at most `wait_s` after the first time."""
    program = program_that_prints(TRAVELLING, f"host_info({asdict(needs)!a})")
    found, failures, answers = dict[Host, Any](), dict[Host, str](), dict[Host, Answer]()
    waits_until, waiting, said = time.monotonic() + wait_s, [*hosts], list[Host]()
    while True:
        new, failed, newest = ask_hosts(
            waiting,
            program,
            work_s=facts.LONGEST_S,
            python=needs.python,
            transport=transport,
            fix=f"Install it, and Python in {sys.base_prefix}, at the same path on every host, "
            "or copy them there: mpiddp hosts push",
            logins=logins,
        )
        found, failures, answers = found | new, failures | failed, answers | newest
        silent = [each for each in answers if not (each in found or answers[each].has_failed_there)]
        # Only people change a host's key.
        waiting = [host for host in silent if _NEW_KEY not in answers[host].stderr]
        left_s = waits_until - time.monotonic()
        if not waiting or left_s <= 0:
            break
        if waiting != said:
            said, some = waiting, listed([host.name for host in waiting], most=3)
            log.info(f"waiting for {some} (up to {duration(max(1.0, left_s))})")
        time.sleep(min(PAUSE_S, left_s))
        names.forget_addresses()  # a name may resolve by now
    infos, complaints = dict[Host, HostInfo](), dict[Host, str]()
    first: HostInfo | None = None  # without a complaint
    for host, answer in answers.items():
        if host in found:
            own = tuple(Interface(**each) for each in found[host].pop("interfaces"))
            if (health := found[host].pop("health")) is not None:
                health = Health.of_json(health)
            info = infos[host] = HostInfo(host, **found[host], interfaces=own, health=health)
            complaint = _complaint(info, first or info, needs)
            first = first or (None if complaint else info)
        else:
            complaint = failures[host]
            if answer.has_failed_there and answer.exit_code != NO_PROGRAM:
                complaint += " Install the same Python there as here."
        if complaint:
            complaints[host] = complaint
    if transport.hint and silent:
        complaints[silent[-1]] += f"\n{transport.hint}"
    asked = {host: info.health or Health() for host, info in infos.items()}
    return Checked(infos, complaints, {host: complaints[host] for host in silent}, asked)


def twins(infos: Mapping[Host, HostInfo]) -> dict[Host, str]:
    """A sentence for each host that is another one under a second name."""
    found, names = dict[Host, str](), dict[str, str]()
    for host, info in infos.items():
        first = names.setdefault(info.machine or host.name, host.name)
        if first != host.name:
            found[host] = f"{host.name} and {first} are the same machine. Merge them into one."
    return found


def _complaint(info: HostInfo, first: HostInfo, needs: Needs) -> str:
    """The problem of this host, as one sentence; "" if it has none.

    Its versions must be those of the first host without a problem.
    """
    name, interface, program = info.host.name, needs.interface, needs.program
    here, there = (".".join(each.split(".")[:2]) for each in (python_version(), info.python))
    if there and there != here:
        problem = f"{needs.python} is Python {there} there, {here} here. Install the same Python"
        return f"{name}: {problem} at the same path on every host."
    if not info.has_folder:
        problem = f"the working folder {needs.folder} is missing"
        return f"{name}: {problem}. {_PUSH}, or launch from a folder that every host has."
    if info.mpirun is None or not info.has_daemon:
        problem = f"{needs.daemon if info.mpirun else needs.mpirun} is missing or does not run."
        return f"{name}: {problem} Install the same MPI at the same path on every host."
    if not info.has_program:
        where = "missing or not executable" if os.sep in str(program) else "not on PATH"
        return f"{name}: {program} is {where}. Install it on every host."
    if not info.has_script:
        return f"{name}: {needs.script} is missing. {_PUSH}."
    if info.health is None and needs.uses_gpus:
        return NO_ANSWER.format(name=name)
    if interface and not any(each.matches(interface) for each in info.interfaces):
        present = all_of(list(dict.fromkeys(each.name for each in info.interfaces)))
        return f'interface "{interface}" is not on {name}, which has {present}.'
    for own in ("torch", "mpi4py", "mpirun"):
        what, same = (needs.mpirun, "MPI") if own == "mpirun" else (own, "version")
        here, there = (getattr(each, own) or "missing" for each in (first, info))
        if here != there:
            versions = f"{here} on {first.host.name}, {there} on {name}"
            return f"{what} differs: {versions}. Install the same {same} on every host."
    return ""
