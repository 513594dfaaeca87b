"""The answer of a host. If a host gives none, a sentence says why, with the command that fixes it."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.errors import MORE_PROCESSES, JobFailed, UserError
from mpiddp.hosts.gpus import tool_output
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import shown, with_fix

if TYPE_CHECKING:
    from configparser import SectionProxy

NO_PROGRAM = 96  # no exit code of ssh (255), of a shell (126, 127, 128 + N) or of Python (1, 2)
_SHOWN = 140  # characters of a reason of ssh
_CONFIG_S = 5.0  # ssh -G, ssh-keygen and ssh-add get this time


@cache
def ssh_errors() -> list[SectionProxy]:
    """The rows of ssh_errors.ini, which says what their fields are. Their names are ids."""
    from configparser import RawConfigParser  # only an error needs it

    missing = {"fix": "", "says": "", "example": ""}
    parser = RawConfigParser(missing, delimiters="=", comment_prefixes=";")
    parser.read(Path(__file__).with_name("ssh_errors.ini"), "utf-8")
    return [parser[name] for name in parser.sections()]


_SAYS_NOTHING = re.compile(
    r"Warning: |Connection (?:closed|reset) by |\W*$|debug\d: ", re.IGNORECASE
)
# ssh has found no way to the host. If a login fails otherwise, the host is up.
_LOST = (
    r"(?m)^(ssh: connect to host \S+ port \d+|channel \d+: open failed): |"
    r"^Connection to \S+ port \d+ timed out|^Timeout, server "
)


@dataclass(frozen=True)
class Answer:
    """The output of a program on a host."""

    host: Host
    python: str  # a path or a name
    transport: Transport
    exit_code: int | None  # None: no end in time; NO_PROGRAM: no such Python; 255: ssh failed
    stdout: str
    stderr: str
    has_begun: bool  # whether the login has succeeded
    printed_before: str = ""  # the output of the start-up files of the shell there

    @property
    def has_failed_there(self) -> bool:
        """Whether the login succeeded, and Python is missing there, too old, or does not start."""
        return self.has_begun and self.exit_code not in (None, 255)

    @property
    def is_lost(self) -> bool:
        """Whether the host is silent: no route leads to it, no sshd listens, or no login ends."""
        says_nothing = self.exit_code is None or not self.transport.is_ssh
        return not self.has_begun and (says_nothing or bool(re.search(_LOST, self.stderr)))

    @property
    def is_of_machine(self) -> bool:
        """Whether a machine or a network has failed, so that nobody has given bad input.

        If a scheduler's program ends at once, it has refused this job, for example because of old variables.
        """
        is_absent = self.is_lost and (self.transport.is_ssh or self.exit_code is None)
        hangs = self.has_begun and self.exit_code in (None, 255)
        return is_absent or hangs or "[Errno " in self.stderr

    @property
    def value(self) -> Any:
        """The JSON that the program has printed, None if there is none."""
        return self._printed[0] if self._printed else None

    @cached_property
    def why(self) -> str:
        """A sentence that says why the program has printed no JSON, "" if it has."""
        if self._printed:
            return ""
        host, python, transport = self.host, self.python, self.transport
        is_ours = os.sep in python  # else any Python will do
        if self.exit_code == NO_PROGRAM:
            fix = "install it there"
            if is_ours:
                fix = f"mpiddp hosts push HOSTFILE, or install it, and Python in {sys.base_prefix}, there"
            return with_fix(f"{host.name}: {python} is missing.", fix)
        if self.has_begun and self.exit_code is None:
            why = "the host is silent, or a file server does not answer"
            hangs = f"{host.name}: {python} has started there, and does not end in time: {why}."
            return with_fix(hangs, f"{ssh_line(host)} df")
        errors = self.stderr.strip().splitlines()
        last = [f"exit code {self.exit_code}", *errors][-1]
        if self.has_failed_there:
            if "[Errno " in last:  # the disk may be full
                fix = (
                    MORE_PROCESSES if f"[Errno {errno.EAGAIN}]" in last else f"{ssh_line(host)} df"
                )
                return with_fix(f"{host.name}: {last.rstrip('.')}.", fix)
            mount = ", on a file system without noexec" * (
                self.exit_code == 126
            )  # it may not be executed
            fix = f"install the same Python there as here{mount}" if is_ours else ""
            return with_fix(f"{host.name}: {python} does not run there: {last.rstrip('.')}.", fix)
        no_end = f"no answer in {transport.login_s:g} s"
        if not transport.is_ssh:
            return transport.complaint(
                host.name, ["no output" if self.exit_code else no_end, *errors][-1]
            )
        printed, text = self.printed_before.strip().splitlines(), self.stderr
        if self.exit_code is None:
            text = f"{no_end}{': nothing' * (not printed)}"
        # If a password has to be changed, sshd itself ends the login so.
        elif self.exit_code != 255 and "Password change required" not in text:
            if subprocess.call(["ssh", "-V"], stderr=subprocess.DEVNULL):  # it asks no host
                return with_fix(f"ssh does not run here: {last}.", "ssh -V; echo $LD_LIBRARY_PATH")
            # An sshd may print a banner, and a start-up file a greeting, before the reason.
            reason = " / ".join(shown(line.rstrip(".")) for line in (*printed[-1:], *errors[-1:]))
            text = f"exit code {self.exit_code}: {reason or 'nothing'}"
        return ssh_complaint(host, text, transport)

    @cached_property
    def _printed(self) -> list[Any]:
        for line in self.stdout.splitlines()[::-1] if self.exit_code == 0 else ():
            with suppress(ValueError):  # a shell of the host may print other lines
                return [json.loads(line)]
        return []


def failure_of(answers: Iterable[Answer], sentences: Iterable[str]) -> UserError | JobFailed:
    """The error of a command because of these answers: a failure if a machine has failed, else bad input."""
    kind = JobFailed if any(answer.is_of_machine for answer in answers) else UserError
    return kind("\n".join(sentences))


def ssh_complaint(host: Host, errors: str, transport: Transport) -> str:
    """The sentence for ssh's own error, with the command that fixes it."""
    lines = errors.strip().splitlines()  # ssh ends them with \r\n
    text, port, ssh = "\n".join(lines), host.port, ssh_line(host)
    words = {
        "name": host.name,
        "target": host.ssh_target,
        "port": f"-p {port} " if port else "",
        "ssh": ssh,
        "verbose": ssh.replace("ssh", "ssh -v", 1),
        "key_name": f"'[{host.address or host.name}]:{port}'"
        if port
        else host.address or host.name,  # in known_hosts
        "here": socket.gethostname(),
        "connect": transport.connect_s,
        "at": port
        or (
            re.findall(r"(?m)^ssh: connect to host \S+ port (\d+)", text)
            or settings(host, "port")
            or [22]
        )[0],
        "longer": f"{2 * transport.login_s:.0f}",
        "kinit": (kinit := "kinit, or " if "gssapi-" in text else ""),
    }
    for error in ssh_errors():
        if match := re.search(error["pattern"], text, re.MULTILINE):
            if error.name == "ssh-key-refused":
                files = (
                    tuple(settings(host, f"{kind}file")) for kind in ("identity", "certificate")
                )
                if why := _refused_because(*files):
                    return with_fix(f"ssh {host.name}: {why[0]}.", kinit + why[1])
            groups = match.groups()
            cause, fix = (error[name].format(*groups, **words) for name in ("cause", "fix"))
            return with_fix(cause, fix)
    # A module of PAM says why, before sshd closes the connection. A warning does not say why.
    says_why = [
        line.strip('"').rstrip(".") for line in lines if line and not _SAYS_NOTHING.match(line)
    ]
    return with_fix(
        f"ssh {host.name} failed: {' / '.join((says_why or lines)[-2:])[:_SHOWN]}.", f"{ssh} true"
    )


def in_general(error: SectionProxy) -> tuple[str, str]:
    """The cause and the fix of an error, for a page that speaks of no host in particular."""
    words = {
        "name": "NODE",
        "target": "NODE",
        "port": "",
        "ssh": "ssh NODE",
        "key_name": "NODE",
        "kinit": "",
    }
    words |= {"here": "this host", "connect": f"{SSH.connect_s}", "at": "22", "longer": "30"}
    cause, fix = (error[field].format(error["example"], **words) for field in ("cause", "fix"))
    return cause, fix


@cache
def _refused_because(keys: Sequence[str], certificates: Sequence[str]) -> tuple[str, str] | None:
    """Why these files of ssh open no login, as far as this machine knows, and the fix; None if it does not."""
    keys = [file for key in keys if os.path.exists(file := os.path.expanduser(key))]  # noqa: PTH110, PTH111
    ends = dict[str, str]()
    # "-" stands for those that the agent holds.
    for file in ("-", *map(os.path.expanduser, certificates), *(f"{key}-cert.pub" for key in keys)):
        text = _output("sh", "-c", 'ssh-add -L | ssh-keygen -L -f "$0"', file)
        ends |= dict.fromkeys(
            re.findall(r"Valid: .*(?:to|before) (\S+)", text),
            "of an agent" if file == "-" else file,
        )
    if (end := max(ends, default="9")) < time.strftime("%Y-%m-%dT%H:%M:%S"):
        return f"the certificate {ends[end]} has ended ({end})", "get a new one from the site"
    agent = _output("ssh-add", "-l")  # "" if none answers
    for key in keys:
        is_open = _output("ssh-keygen", "-y", "-P", "", "-f", key)
        fingerprint = _output("ssh-keygen", "-l", "-f", key).split(" ")[1:2]
        if fingerprint and not is_open and fingerprint[0] not in agent:
            start = "" if agent else 'eval "$(ssh-agent)"; '
            return f"the key {key} has a passphrase, and no agent holds it", f"{start}ssh-add {key}"
    no_key = "no agent and no file of yours has a key", "mpiddp hosts keys HOSTFILE"
    return None if keys or agent[:1].isdigit() else no_key


def settings(host: Host, name: str) -> list[str]:
    """The values of ssh's own configuration for a host."""
    return re.findall(f"(?m)^{name} (.+)$", _output("ssh", "-G", "--", host.ssh_target))


def _output(program: str, *arguments: str) -> str:
    return tool_output(program, arguments, None, _CONFIG_S) or ""


def ssh_line(host: Host) -> str:
    """The command that a person types to log in."""
    return f"ssh {f'-p {host.port} ' if host.port else ''}{host.ssh_target}"
