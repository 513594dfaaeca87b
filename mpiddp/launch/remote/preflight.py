"""The preflight: check every host before anything starts, so that a broken host causes an error, not a hang.

It contacts all hosts at once over ssh, or a scheduler's own transport, and needs only a Python 3 there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from mpiddp.errors import UserError
from mpiddp.hosts import gpu_tools, interfaces, probe, versions
from mpiddp.hosts.gpu_variables import hides_all_gpus
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.nodes import UnusableHosts
from mpiddp.hosts.ssh import CONNECT_TIMEOUT_S, NO_PROGRAM, Answer, run_on_hosts
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.launch.remote.gpus import no_answer_of_gpus, no_python
from mpiddp.text import all_of

TIMEOUT_S = 15.0

# The modules that are sent to the hosts, each after those that it imports.
TRAVELLING: tuple[ModuleType, ...] = (interfaces, gpu_tools, versions, probe)

_REMOTE_PROGRAM = """
import json, sys, types
sources, requirements = json.loads({payload!r})
for name, source in sources.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
print(json.dumps(sys.modules[{probe!r}].host_info(requirements)))
"""


@dataclass(frozen=True)
class HostRequirements:
    """What every host must have. Paths are absolute."""

    python: str
    mpirun: str
    daemon: str  # the program that mpirun starts there
    folder: str
    path: str  # the PATH that the ranks will have
    interface: str | None = None  # by name, address or network
    program: str | None = None  # that the ranks run, by its path or on `path`


@dataclass(frozen=True)
class HostInfo:
    """The probe's result for one host, see `mpiddp.hosts.probe.host_info`."""

    host: Host
    has_folder: bool
    has_daemon: bool
    has_program: bool
    mpirun: str | None  # its first lines of --version
    torch: str | None
    mpi4py: str | None
    gpus: int | None  # None if the vendor's tool does not answer
    interfaces: tuple[Interface, ...]


def check_hosts(
    hosts: Sequence[Host],
    requirements: HostRequirements,
    transport: Transport = SSH,
    *,
    known: Mapping[Host, HostInfo] | None = None,
    proven: Collection[Host] = (),
) -> dict[Host, HostInfo]:
    """Check that every host can be used, and that all have the same versions.

    Args:
        known: the results of hosts that need no new check.
        proven: hosts that have run the job. Another one with other versions cannot be used.

    Raises:
        UnusableHosts: some hosts cannot be used.
        UserError: versions differ between the hosts.
    """
    known = known or {}
    answers = run_on_hosts(
        [host for host in hosts if host not in known],
        requirements.python,
        probe_program(requirements),
        timeout_s=TIMEOUT_S,
        transport=transport,
    )
    infos = {host: known[host] for host in hosts if host in known}
    complaints: dict[Host, str] = {}
    hint = ""
    for host, answer in answers.items():
        info = _read(host, answer)
        if info is None and answer.exit_code != NO_PROGRAM:
            hint = transport.hint
        complaint = (
            _complaint(info, requirements)
            if info
            else _no_answer(host, answer, requirements, transport)
        )
        if complaint:
            complaints[host] = complaint
        elif info:
            infos[host] = info
    complaints |= _strangers(infos, proven, requirements)
    if complaints:
        raise UnusableHosts(complaints, hint)
    if disagreements := _disagreements(infos.values(), requirements):
        raise UserError("\n".join(disagreements))
    return infos


def probe_program(requirements: HostRequirements) -> str:
    """A Python program that prints a host's HostInfo. It needs the standard library alone."""
    # The names by which the probe imports, with empty parent packages.
    sources = {"mpiddp": "", "mpiddp.hosts": ""}
    for module in TRAVELLING:
        assert module.__file__ is not None
        sources[module.__name__] = Path(module.__file__).read_text()
    payload = json.dumps([sources, asdict(requirements)])
    return _REMOTE_PROGRAM.format(payload=payload, probe=probe.__name__)


def _read(host: Host, answer: Answer) -> HostInfo | None:
    """The result in the probe's last line. The start-up files of the remote shell may print others before."""
    for line in reversed(answer.stdout.splitlines()):
        if line.startswith('{"has_folder"'):
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                fields = json.loads(line)
                found = tuple(Interface(**each) for each in fields.pop("interfaces"))
                return HostInfo(host, **fields, interfaces=found)
    return None


def _complaint(info: HostInfo, requirements: HostRequirements) -> str | None:
    """The problem of this host alone, as one sentence; None if it has none."""
    name = info.host.name
    if not info.has_folder:
        return (
            f"{name}: the working folder {requirements.folder} is missing. "
            "Create it there, or launch from a folder that every host has."
        )
    for program, is_there in (
        (requirements.mpirun, info.mpirun is not None),
        (requirements.daemon, info.has_daemon),
    ):
        if not is_there:
            return (
                f"{name}: {program} is missing or does not run. "
                "Install the same MPI at the same path on every host."
            )
    if not info.has_program:
        where = (
            "missing or not executable" if os.sep in str(requirements.program) else "not on PATH"
        )
        return f"{name}: {requirements.program} is {where}. Install it on every host."
    if info.gpus is None and not hides_all_gpus(os.environ):
        return no_answer_of_gpus(name)
    interface = requirements.interface
    if interface and not any(each.matches(interface) for each in info.interfaces):
        return (
            f'interface "{interface}" is not on {name}, '
            f"which has {all_of([each.name for each in info.interfaces])}."
        )
    return None


def _no_answer(
    host: Host, answer: Answer, requirements: HostRequirements, transport: Transport
) -> str:
    """The reason why the probe did not answer, as one sentence."""
    if answer.exit_code == NO_PROGRAM:
        return no_python(host.name, requirements.python)
    if not transport.is_ssh:
        no_answer = [f"no answer in {TIMEOUT_S:g} s" if answer.exit_code is None else "no output"]
        reason = (answer.stderr.strip().splitlines() or no_answer)[-1].rstrip(".")
        return (
            f"{transport.name} {host.name} failed: {reason}. "
            f"Where ssh is allowed, it can be used instead: {transport.instead}"
        )
    if answer.exit_code is None:
        return f"ssh {host.name}: no answer in {TIMEOUT_S:g} s. Try: {_ssh(host)} true"
    return _ssh_complaint(host, answer.stderr)


def _ssh_complaint(host: Host, errors: str) -> str:
    """The sentence for ssh's own error, with the command that fixes it."""
    name, here = host.name, socket.gethostname()
    if "Could not resolve hostname" in errors:
        return f"{name}: cannot be resolved from {here}. Add it to DNS or /etc/hosts."
    if "IDENTIFICATION HAS CHANGED" in errors:
        return (
            f"ssh {name}: its host key has changed. Check that it is the same host, "
            f"then run: ssh-keygen -R {name}"
        )
    if "Host key verification failed" in errors:
        return (
            f"ssh {name}: its host key is unknown. "
            f"Check it, then: ssh-keyscan {_port(host)}{name} >> ~/.ssh/known_hosts"
        )
    if denied := re.search(r"Permission denied \(([^)]*)\)", errors):
        return f"ssh {name}: permission denied ({denied[1]}). Run: ssh-copy-id {_port(host)}{host.ssh_target}"
    if "Connection refused" in errors:
        return (
            f"ssh {name}: connection refused. "
            f"Start sshd there, or give its port in the hostfile: {name} port=N"
        )
    if "No route to host" in errors or "Network is unreachable" in errors:
        return f"ssh {name}: no route from {here}. Check that the host is on and the network is up."
    if "timed out" in errors:
        return (
            f"ssh {name}: no answer in {CONNECT_TIMEOUT_S} s. "
            "Check that the host is on and the network is up."
        )
    last = errors.strip().splitlines()[-1:] or ["no output"]
    return f"ssh {name} failed: {last[0]}. Try: {_ssh(host)} true"


def _ssh(host: Host) -> str:
    return f"ssh {_port(host)}{host.ssh_target}"


def _port(host: Host) -> str:
    """The port option of ssh, ssh-copy-id and ssh-keyscan."""
    return f"-p {host.port} " if host.port else ""


def _strangers(
    infos: Mapping[Host, HostInfo], proven: Collection[Host], requirements: HostRequirements
) -> dict[Host, str]:
    """The hosts with other versions than all of `proven` have, with a sentence for each."""
    complaints = {}
    judges = [info for host, info in infos.items() if host in proven]
    if not judges or _disagreements(judges, requirements):
        return {}
    for host, info in infos.items():
        if host not in proven and (found := _disagreements([*judges, info], requirements)):
            complaints[host] = f"{host.name}: {found[0]}"
    return complaints


def _disagreements(infos: Iterable[HostInfo], requirements: HostRequirements) -> list[str]:
    """The version differences between hosts that can each be used alone."""
    infos = tuple(infos)
    complaints = []
    for package in ("torch", "mpi4py"):
        versions = {info.host.name: getattr(info, package) or "missing" for info in infos}
        if len(set(versions.values())) > 1:
            complaints.append(
                f"{package} differs: {_by_value(versions)}. Install the same version on every host."
            )
    versions = {info.host.name: (info.mpirun or "").partition("\n")[0] for info in infos}
    if len(set(versions.values())) > 1:
        complaints.append(
            f"{requirements.mpirun} differs: {_by_value(versions)}. "
            "Install the same MPI on every host."
        )
    return complaints


def _by_value(values: Mapping[str, str]) -> str:
    """{"a": "1", "b": "1", "c": "2"} to "1 on a and b, 2 on c"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return ", ".join(f"{value} on {all_of(names)}" for value, names in groups.items())
