"""The preflight: check every host before anything starts, so that a broken host causes an error, not a hang.

It contacts all hosts at once over ssh, or a scheduler's own transport, and needs only a Python 3 there. With
`--wait-for-hosts 10m` it asks silent hosts again: the pods of a cluster start one by one, and a name may not
resolve at first. It also waits for GPUs that another process holds, and claims them once all are free at the same
time, so that one of two launches begins after the other.

The needs of the ranks come in, and Checked goes out: a complaint for each host that cannot be used, also because of
a fault of its GPUs, and notes on conditions that may only disturb the job.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from mpiddp.hosts import facts, gpu_health, gpus, interfaces, names, processes
from mpiddp.hosts.complaints import Answer, ssh_line
from mpiddp.hosts.containers import identity, says_missing
from mpiddp.hosts.gpu_faults import faults, in_use
from mpiddp.hosts.gpu_faults import notes as notes_on
from mpiddp.hosts.gpus import NO_ANSWER, Gpu, chosen_gpus
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.ssh import Logins, ask_hosts, program_that_prints
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.launch import log
from mpiddp.launch.plan.environment import Environment
from mpiddp.text import all_of, differences, duration, escaped, listed, with_fix

PAUSE_S = 1.0  # between two attempts to reach a host
LEAST_START_S, LONGEST_START_S = 3.0, 60.0  # for a program to start on all hosts
_ANYWAY = "--no-check, to start anyway"
_PUSH = "mpiddp launch --push …, or mpiddp hosts push HOSTFILE"
_EVERYWHERE = "at the same path on every host"
_NEW_KEY = "Host key verification failed"

# The modules that are sent to the hosts, each after those that it imports. They need only a Python.
TRAVELLING: tuple[ModuleType, ...] = (interfaces, gpus, processes, gpu_health, facts)


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
    gpus: Sequence[Gpu] | None  # None if the vendor's tool does not answer
    interfaces: tuple[Interface, ...]
    python: str = ""  # its version
    has_script: bool = True
    errors: Mapping[str, str] = field(default_factory=dict)  # of paths that its user lacks
    address: str = ""  # of this host, to which ssh has connected
    machine: str = ""  # equal for two names of one machine; "" if it is not known
    hostname: str = ""  # its own name
    image: str | None = ""  # what its runtime says of the image, None without an answer

    @classmethod
    def of_json(cls, host: Host, fields: dict[str, Any]) -> HostInfo:
        """The result that a host has sent as JSON."""
        gpus = fields["gpus"] and [Gpu.of_json(*values) for values in fields["gpus"]]
        present = tuple(Interface(**values) for values in fields["interfaces"])
        return cls(host, **{**fields, "gpus": gpus, "interfaces": present})


class Waits(NamedTuple):
    """For what a preflight waits."""

    wait_s: float = 0.0  # the most seconds
    enough: int = 0  # the number of hosts with which it waits no longer
    tell: Callable[[str], None] | None = None  # is told for what it waits
    gpus: Callable[[Host, Sequence[Gpu]], list[int | None]] | None = (
        None  # those of a host's ranks; None: for no GPU
    )


NOT_AT_ALL = Waits()


class Checked(NamedTuple):
    """The results of a preflight; nothing if none was run."""

    infos: Mapping[Host, HostInfo] = MappingProxyType({})  # of each host that has answered
    complaints: Mapping[Host, str] = MappingProxyType({})  # a sentence for each unusable host
    silent: Collection[Host] = ()  # the hosts that have not answered
    failed: Collection[Host] = ()  # the hosts that are off, full, or cannot be reached
    gpus: Mapping[Host, Sequence[Gpu]] = MappingProxyType({})  # of each host that has answered
    notes: Mapping[Host, Sequence[str]] = MappingProxyType({})  # about GPUs that can be used
    start_s: float = LEAST_START_S  # until a program runs on all hosts, by the latest logins


def preflight(
    hosts: Sequence[Host],
    needs: Mapping[str, Any],
    transport: Transport = SSH,
    *,
    waits: Waits = NOT_AT_ALL,
    logins: Logins | None = None,  # gets those of the hosts that answer, which remain open
) -> Checked:
    """Ask each host, and again for at most `waits.wait_s`, until `waits.enough` hosts are there and free.

    `needs`: the things that every host must have, which `run_preflight` names.
    """
    program = program_that_prints(TRAVELLING, f"host_info({needs!a})")
    ask = partial(
        ask_hosts,
        python=needs["python"],
        work_s=facts.LONGEST_S,
        transport=transport,
        logins=logins,
    )
    answers, began_at = dict[Host, Answer](), time.monotonic()
    waits_until, waiting, announced = began_at + waits.wait_s, [*hosts], list[str]()
    while True:
        answers |= ask(
            hosts if waits.gpus else waiting, program
        )  # a GPU that was free may be in use by now
        silent = [
            host for host, answer in answers.items() if answer.why and not answer.has_failed_there
        ]
        # To wait for another host key would be in vain, because only people change it.
        missing = [host for host in silent if _NEW_KEY not in answers[host].stderr]
        there = {
            host: HostInfo.of_json(host, answer.value)
            for host, answer in answers.items()
            if not answer.why
        }
        busy = _busy(there, waits, ask, logins) if logins is not None else {}
        waiting, left_s = [*missing, *busy], waits_until - time.monotonic()
        if left_s <= 0 or len(hosts) - len(waiting) >= waits.enough:
            break
        reasons = [*(f"{host.name} does not answer." for host in missing), *busy.values()]
        if reasons != announced:
            announced, some = reasons, listed([host.name for host in waiting], most=3)
            log.info(f"waiting for {some} (up to {duration(max(1.0, left_s))})")
            for sentence in busy.values():
                log.info(sentence)
            if waits.tell is not None:
                waits.tell(" ".join(reasons))
        # At another moment than a launch that waits for the same GPUs.
        time.sleep(min(PAUSE_S if missing else random.uniform(PAUSE_S, 5 * PAUSE_S), left_s))
        names.forget_addresses()  # a name may resolve by now
    complaints = {host: with_fix(sentence, _ANYWAY) for host, sentence in busy.items()}
    first: HostInfo | None = None  # the first host without a complaint
    for host, answer in answers.items():
        if not (complaint := answer.why):
            info = there[host]
            complaint = _complaint(info, first or info, needs)
            first = first or (None if complaint else info)
        if complaint:
            complaints[host] = complaint
    if transport.hint and silent:
        complaints[silent[-1]] += f"\n{transport.hint}"
    return Checked(
        there,
        {**_mistaken(there), **complaints},
        silent=silent,
        failed={host for host, answer in answers.items() if answer.why and answer.is_of_machine},
        gpus={host: info.gpus or () for host, info in there.items()},
        start_s=min(LEAST_START_S + 2 * (time.monotonic() - began_at), LONGEST_START_S),
    )


def _busy(
    there: Mapping[Host, HostInfo],
    waits: Waits,
    ask: Callable[..., dict[Host, Answer]],
    logins: Logins,
) -> dict[Host, str]:
    """A sentence for each host whose GPUs are in use. It claims those of the other hosts, if these are enough.

    A claim lasts as long as the host's login. A launch that gets too few ends its logins, and asks again.
    """
    present = {host: info.gpus or () for host, info in there.items()}
    chosen = {host: waits.gpus(host, gpus) for host, gpus in present.items()} if waits.gpus else {}
    found = {host: [*in_use(host.name, present[host], chosen[host])] for host in chosen}
    busy = {host: "\n".join(sentences) for host, sentences in found.items() if sentences}
    free = [host for host in chosen if host not in busy]
    if free and len(free) >= waits.enough:
        addresses = {
            there[host].machine: [
                gpu.address for at, gpu in enumerate(present[host]) if at in chosen[host]
            ]
            for host in free
        }
        answers = ask(free, program_that_prints(TRAVELLING[:-1], f"claim({addresses!a})"))
        for host in (host for host in free if answers[host].why or answers[host].value):
            taken = f"{host.name}: another launch, of {answers[host].value}, begins on its GPUs."
            busy[host] = answers[host].why or taken
        logins.have_claims = len(there) - len(busy) >= waits.enough
        if not logins.have_claims:
            logins.close()
    return busy


def check_gpus(checked: Checked, environment: Environment) -> Checked:
    """`checked` with a complaint for each host with a fault, and with notes, about the GPUs of its ranks."""
    broken, noted = dict[Host, str](), dict[Host, list[str]]()
    for host, present in checked.gpus.items():
        chosen = chosen_gpus(present, environment.on(host), host.gpus)
        if sentences := [*faults(host.name, present, chosen)]:
            broken[host] = with_fix("\n".join(sentences), _ANYWAY)
        ssh = "" if is_this_host(host.name) else ssh_line(host)
        noted[host] = [*notes_on(host.name, present, chosen, ssh)]
    return checked._replace(complaints={**broken, **checked.complaints}, notes=noted)


def _mistaken(infos: Mapping[Host, HostInfo]) -> dict[Host, str]:
    """A sentence for each host that mpirun would take for another one: they share a machine, or a name."""
    sentences, machines = dict[Host, str](), dict[str, str]()
    short = {host: host.name.partition(".")[0] for host in infos}
    named = {name: host for host, name in short.items()}
    for host, info in infos.items():
        first = machines.setdefault(info.machine or host.name, host.name)
        another = named.get(info.hostname.partition(".")[0], host)
        if first != host.name:
            sentences[host] = with_fix(
                f"{host.name} and {first} are the same machine.", "merge them into one"
            )
        elif short[another] != short[host]:
            sentences[host] = with_fix(
                f"{host.name}: its own name is {another.name}, another host of the job.",
                f"correct /etc/hosts or DNS here, or /etc/hostname there: {ssh_line(host)} hostname",
            )
    return sentences


def _complaint(info: HostInfo, first: HostInfo, needs: Mapping[str, Any]) -> str:
    """The problem of this host, as one sentence; "" if it has none.

    Its versions must be those of the first host without a problem.
    """
    name, interface, program = info.host.name, needs["interface"], needs["program"]
    here, there = (".".join(text.split(".")[:2]) for text in (sys.version, info.python))
    if there and there != here:
        problem = f"{needs['python']} is Python {there} there, {here} here"
        return with_fix(f"{name}: {problem}.", f"install the same Python {_EVERYWHERE}")
    for path, error in info.errors.items():
        way = f"give {info.host.user or 'your user'} there access to each folder on the way"
        return with_fix(f"{name}: {path.removesuffix('/.')}: {error}.", way)
    if not info.has_folder:
        fix = f"{_PUSH}, or launch from a folder that every host has"
        return with_fix(f"{name}: the working folder {needs['folder']} is missing.", fix)
    if needs["mpirun"] and (info.mpirun is None or not info.has_daemon):
        problem = f"{needs['daemon' if info.mpirun else 'mpirun']} is missing or does not run"
        return with_fix(f"{name}: {problem}.", f"install the same MPI {_EVERYWHERE}")
    if not info.has_program:
        where = "missing or not executable" if os.sep in program else "not on PATH"
        return with_fix(f"{name}: {program} is {where}.", "install it on every host")
    if image := [*needs["image"]][-1:]:
        said = (info.image or f"no answer of {program}").strip()
        if not identity(said):
            here = "" if is_this_host(name) else f"{ssh_line(info.host)} "
            fix = needs["image_fix"] if says_missing(said) else f"{here}{program} info"
            return with_fix(f"{name}: {image[0]}: {escaped(said.splitlines()[-1])}", fix)
        if identity(said) != identity(first.image or ""):
            return with_fix(
                f"{image[0]} is another image on {first.host.name} than on {name}.",
                needs["image_fix"],
            )
    if not info.has_script:
        return with_fix(f"{name}: {needs['script']} is missing.", _PUSH)
    if info.gpus is None and needs["uses_gpus"]:
        return NO_ANSWER.format(name=name)
    if interface and not any(present.matches(interface) for present in info.interfaces):
        names = all_of(list(dict.fromkeys(present.name for present in info.interfaces)))
        return with_fix(
            f'interface "{interface}" is not on {name}, which has {names}.',
            "name one of these, or none",
        )
    software = {"torch": "torch", "mpi4py": "mpi4py", "mpirun": needs["mpirun"]}
    for fact, program in software.items():
        versions = {host.host.name: getattr(host, fact) or "missing" for host in (first, info)}
        if sentence := differences(program, versions):
            same = "MPI" if fact == "mpirun" else "version"
            return with_fix(f"{sentence}.", f"install the same {same} on every host")
    return ""
