"""A look at every host before anything starts: a sentence per broken host instead of a hang.

All hosts are asked at once over ssh, with ssh's own checks as the user has set them, and a Python 3
is all that the far side needs.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError
from mpiddp.hosts import interfaces as interfaces_module
from mpiddp.hosts import probe
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.nodes import UnusableHosts
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.ssh import CONNECT_TIMEOUT_S, in_sh, require_ssh, ssh_to
from mpiddp.launch.remote.gpus import no_nvidia_smi
from mpiddp.text import all_of

LOOK_TIMEOUT_S = 15.0
PIPES_PER_HOST = 6  # three, and their other ends for as long as ssh starts

# What the far shell runs. It is the same for every host and every user: what varies comes through
# stdin, so no word of a hostfile or of a path is ever read as shell. The shell is the same kind that
# mpirun's daemon is started by: no login, no prompt, no activated environment. From the root folder,
# for `python -` would import what lies where it starts.
_FAR_SHELL = (
    "IFS= read -r python; "
    'if command -v "$python" >/dev/null 2>&1; then cd / && exec "$python" -; '
    "else echo '{\"has_python\": false}'; fi"
)

_FAR_PYTHON = """
import json, sys, types
sources, wanted = json.loads({payload!r})
for name, source in sources.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
print(json.dumps({{"has_python": True, **sys.modules["probe"].look(wanted)}}))
"""


@dataclass(frozen=True)
class HostInfo:
    """What one host told of itself, see `mpiddp.hosts.probe.look`."""

    host: Host
    torch: str | None
    mpi4py: str | None
    mpirun: str | None  # its first lines of --version
    gpus: int
    interfaces: tuple[Interface, ...] = ()


@dataclass(frozen=True)
class HostRequirements:
    """What has to be on every host. Paths are absolute."""

    python: str
    mpirun: str
    daemon: str  # what mpirun starts there
    folder: str
    path: str  # the PATH that the ranks will have
    interface: str | None = None  # by name, address or network


def look(
    hosts: Sequence[Host], local: Sequence[bool], wanted: HostRequirements
) -> dict[Host, HostInfo]:
    """Ask every host at once. `local` says which of them is this machine, which needs no ssh.

    Raises:
        UnusableHosts: hosts that cannot be used.
        UserError: hosts that do not fit together.
    """
    allow_open(PIPES_PER_HOST * len(hosts) + OPEN_BESIDES)
    if not all(local):
        require_ssh()
    script = f"{wanted.python}\n{_far_python(wanted)}"
    asked = [
        _Asked(host, _command(host, is_local), script)
        for host, is_local in zip(hosts, local, strict=True)
    ]
    _converse(asked)
    unfit = {each.host: complaint for each in asked if (complaint := each.complaint(wanted))}
    if unfit:
        raise UnusableHosts(unfit)
    facts = [each.facts() for each in asked]
    if complaints := _disagreements(facts, wanted):
        raise UserError("\n".join(complaints))
    return dict(zip(hosts, facts, strict=True))


def _command(host: Host, is_local: bool) -> list[str]:
    if is_local:
        return ["sh", "-c", _FAR_SHELL]
    return [*ssh_to(host), in_sh(_FAR_SHELL)]


def _far_python(wanted: HostRequirements) -> str:
    sources = {
        "mpiddp": "",
        "mpiddp.hosts": "",
        "mpiddp.hosts.interfaces": Path(interfaces_module.__file__).read_text(),
        "probe": Path(probe.__file__).read_text(),
    }
    return _FAR_PYTHON.format(payload=json.dumps([sources, asdict(wanted)]))


class _Asked:
    """One host's conversation: the process, and what it has said so far."""

    def __init__(self, host: Host, command: Sequence[str], script: str) -> None:
        self.host = host
        # A file and no pipe, which takes less than a script where a user has many of them.
        stdin = os.memfd_create("mpiddp-look")
        os.write(stdin, script.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        os.close(stdin)
        self.output = {"stdout": b"", "stderr": b""}
        self.timed_out = False

    def complaint(self, wanted: HostRequirements) -> str | None:
        """What is wrong with this host alone, as one sentence; None if nothing is."""
        name, errors = self.host.name, self.output["stderr"].decode(errors="replace")
        answer = self._answer()
        if answer is None and self.timed_out:
            return f"ssh {name}: no answer in {LOOK_TIMEOUT_S:g} s. Try: {_ssh(self.host)} true"
        if answer is None:
            return _ssh_complaint(self.host, errors)
        if not answer["has_python"]:
            return f"{name}: {wanted.python} is missing. Install it at the same path on every host."
        if not answer["has_folder"]:
            return (
                f"{name}: the working folder {wanted.folder} is missing. "
                "Make it there, or start from a folder that every host has."
            )
        for program, is_there in (
            (wanted.mpirun, answer["mpirun"] is not None),
            (wanted.daemon, answer["has_daemon"]),
        ):
            if not is_there:
                return (
                    f"{name}: {program} is missing or does not run. "
                    "Install the same MPI at the same path on every host."
                )
        if answer["gpus"] is None and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            return no_nvidia_smi(name)
        interfaces = [Interface(**each) for each in answer["interfaces"]]
        if wanted.interface and not any(i.matches(wanted.interface) for i in interfaces):
            return (
                f'interface "{wanted.interface}" is not on {name}, '
                f"which has {all_of([interface.name for interface in interfaces])}."
            )
        return None

    def facts(self) -> HostInfo:
        answer = self._answer()
        assert answer is not None
        return HostInfo(
            host=self.host,
            torch=answer["torch"],
            mpi4py=answer["mpi4py"],
            mpirun=answer["mpirun"],
            gpus=answer["gpus"] or 0,
            interfaces=tuple(Interface(**each) for each in answer["interfaces"]),
        )

    def _answer(self) -> dict[str, Any] | None:
        """The last line that is ours: a far shell's start-up files may print before it."""
        for line in reversed(self.output["stdout"].decode(errors="replace").splitlines()):
            if line.startswith('{"has_python"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return None


def _converse(asked: Sequence[_Asked]) -> None:
    """Collect every answer, all hosts at the same time."""
    deadline = time.monotonic() + LOOK_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for each in asked:
            assert each.process.stdout is not None
            assert each.process.stderr is not None
            selector.register(each.process.stdout, selectors.EVENT_READ, (each, "stdout"))
            selector.register(each.process.stderr, selectors.EVENT_READ, (each, "stderr"))
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                each, stream = key.data
                chunk = key.fileobj.read1(65536)  # type: ignore[union-attr]
                each.output[stream] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
        for key in list(selector.get_map().values()):
            key.data[0].timed_out = True
    for each in asked:
        if each.timed_out:
            each.process.kill()
        each.process.wait()


def _ssh_complaint(host: Host, errors: str) -> str:
    """ssh's own words, as a sentence that says what to do."""
    name, here = host.name, socket.gethostname()
    if "Could not resolve hostname" in errors:
        return f"{name}: cannot be resolved from {here}. Add it to DNS or /etc/hosts."
    if "IDENTIFICATION HAS CHANGED" in errors:
        return (
            f"ssh {name}: its host key has changed. Make sure that it is the same host, "
            f"then: ssh-keygen -R {name}"
        )
    if "Host key verification failed" in errors:
        return (
            f"ssh {name}: its host key is unknown. "
            f"Check it, then: ssh-keyscan {_port(host)}{name} >> ~/.ssh/known_hosts"
        )
    if denied := re.search(r"Permission denied \(([^)]*)\)", errors):
        return f"ssh {name}: permission denied ({denied[1]}). Run: ssh-copy-id {_port(host)}{host.ssh_target}"
    if "Connection refused" in errors:
        return f"ssh {name}: connection refused. Start sshd there, or name its port: port="
    if "No route to host" in errors or "Network is unreachable" in errors:
        return (
            f"ssh {name}: no route leads there from {here}. Is it switched on, and the network up?"
        )
    if "timed out" in errors:
        return f"ssh {name}: no answer in {CONNECT_TIMEOUT_S} s. Is it switched on, and the network up?"
    last = errors.strip().splitlines()[-1:] or ["it said nothing"]
    return f"ssh {name} failed: {last[0]}. Try: {_ssh(host)} true"


def _ssh(host: Host) -> str:
    return f"ssh {_port(host)}{host.ssh_target}"


def _port(host: Host) -> str:
    """As ssh, ssh-copy-id and ssh-keyscan all have it."""
    return f"-p {host.port} " if host.port else ""


def _disagreements(facts: Sequence[HostInfo], wanted: HostRequirements) -> list[str]:
    """What differs between hosts that each look right alone."""
    complaints = []
    for package in ("torch", "mpi4py"):
        versions = {each.host.name: getattr(each, package) or "missing" for each in facts}
        if len(set(versions.values())) > 1:
            complaints.append(f"{package} differs: {_by_value(versions)}.")
    versions = {each.host.name: (each.mpirun or "").partition("\n")[0] for each in facts}
    if len(set(versions.values())) > 1:
        complaints.append(f"{wanted.mpirun} differs: {_by_value(versions)}.")
    return complaints


def _by_value(values: Mapping[str, str]) -> str:
    """{"a": "1", "b": "1", "c": "2"} to "1 on a and b, 2 on c"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return ", ".join(f"{value} on {all_of(names)}" for value, names in groups.items())
