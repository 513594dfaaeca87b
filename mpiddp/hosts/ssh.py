"""Run one program on many hosts at once over ssh, or another transport, and collect each host's output.

All connections of a job have one ssh configuration, `ssh_config`, over the user's own. ssh never prompts the
user. It checks host keys as the user has configured. What ssh itself complains about becomes a sentence with
the command that fixes it.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from mpiddp.hosts.gpus import tool_output
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import shown

NO_PROGRAM = 96  # not an exit code of ssh (255), a shell (126, 127, 128 + N) or Python (1, 2)
# sshd drops some of more than ten logins that have not ended (MaxStartups 10:30:100). All logins through a
# jump host meet at its sshd.
MOST_LOGINS, MOST_BEHIND_JUMP = 32, 8

_LONGEST_WAIT_S = 3600.0  # epoll accepts no infinite time
_FILES_PER_HOST = 3  # stdin's socket, stdout's pipe and stderr's file
_FILES_TO_START = 12  # while a process starts
_CONFIG_S = 5.0
_END_S = 4.0  # for a program on this machine to end
_TOGETHER_S = 1.0  # answers that come within this time are shown together

# The command of the shell on each host. It is the same for every host and every user: the program's
# name comes through stdin, so that no shell interprets a part of a hostfile or of a path. mpirun's
# daemon starts in the same kind of shell: not a login shell, not interactive, no activated environment.
# The program starts in the root folder, because Python imports modules from its working folder. It is Python
# where a login stays open: then it gets one program after the other, each behind a line with its size.
LOGIN = "mpiddp-login"  # the line that proves the login; start-up files may print before it
_SHELL_LINE = (
    f"echo {LOGIN}; IFS= read -r program; IFS= read -r code; "
    f'command -v "$program" >/dev/null 2>&1 || exit {NO_PROGRAM}; '
    'cd / && exec "$program" ${code:+-c "$code"}'
)
_ANSWERED = "mpiddp-answered\n"  # the line behind each answer of a login that stays open
_READ_ON = (
    "import os, sys; stdin = os.fdopen(0, 'rb'); [(exec(stdin.read(int(size)), {}), sys.stdout.write("
    f"{_ANSWERED!r}), sys.stdout.flush()) for size in iter(stdin.readline, b'')]"
)

# Of all connections of a job, before the settings of the user. ssh takes the first value that it finds. A job
# whose ssh became the master (ControlMaster) would end the user's own logins with its own; it may use one.
# ssh gives up in the fourth interval without a sign of the host: within 20 s.
_SETTINGS = """\
Host *
  BatchMode yes
  ConnectTimeout {connect_s}
  ServerAliveInterval 4
  ControlMaster no
  ClearAllForwardings yes
  RemoteCommand none
  RequestTTY no
  Include ~/.ssh/config
  Include /etc/ssh/ssh_config
"""


@dataclass(frozen=True)
class Answer:
    """The output of a program on a host."""

    exit_code: int | None  # None: not in time; NO_PROGRAM: the host has none; 255: ssh failed
    stdout: str
    stderr: str
    has_begun: bool = True  # the login succeeded
    printed_before: str = ""  # by the start-up files of the shell there
    at: float = field(default=0.0, compare=False)  # when the program had ended, since 1970

    @property
    def has_failed_there(self) -> bool:
        """Whether the login succeeded and the program did not: it is missing, too old, or does not start."""
        return self.has_begun and self.exit_code not in (None, 255)


def run_on_hosts(
    hosts: Sequence[Host],
    program: str,  # a path or a name, without arguments
    input: str,
    *,
    timeout_s: float | None = None,  # for each host; None: that of its login
    work_s: float = 0.0,  # more, once its login is done
    transport: Transport = SSH,
    most_at_once: int | None = None,  # hosts on which it runs at a time
    logins: Logins | None = None,  # open ones; `program` is Python, and those that answer stay open
    show: Callable[[Mapping[Host, Answer]], None] = lambda answers: None,  # those of each second
) -> dict[Host, Answer]:
    """Run `program` on all hosts at the same time, each with `input` as its stdin.

    So many logins as sshd accepts go on at once. This machine runs the program directly. A process that still
    runs at its deadline is killed on this side. Raises UserError if the transport is not installed here.
    """
    if other_hosts(hosts):
        transport.check_installed()
    logins = logins if transport.is_ssh else None  # that of a scheduler may want the end of stdin
    login_s = transport.login_s if timeout_s is None else timeout_s
    limit = allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
    unused = limit - len(list(Path("/proc/self/fd").iterdir())) - _FILES_TO_START
    at_once = max(1, min(unused // _FILES_PER_HOST, most_at_once or len(hosts)))
    most_pending = logins_at_once(hosts, transport)
    waiting, running = [*reversed(hosts)], list[Login]()
    answers, new = dict[Host, Answer](), set[Host]()
    show_at = math.inf
    try:
        with config_file(hosts, transport) as config, selectors.DefaultSelector() as selector:
            while waiting or running:
                pending = sum(not each.has_begun for each in running)
                while waiting and len(running) < at_once and pending < most_pending:
                    host = waiting.pop()
                    each = logins.pop(_key(host), None) if logins else None
                    if each is None:
                        each = Login(host, shell_command(host, _SHELL_LINE, transport, config))
                    each.host = host  # of the same name
                    each.ask(program, input, login_s, work_s, stays_open=logins is not None)
                    running.append(each)
                    selector.register(each.stdout, selectors.EVENT_READ, each)
                    pending += 1
                wait_s = min(show_at, *(each.deadline for each in running)) - time.monotonic()
                events = selector.select(min(max(0.0, wait_s), _LONGEST_WAIT_S))
                closed = [key.data for key, _ in events if not key.data.read()]
                now = time.monotonic()
                for each in [each for each in running if each in closed or each.deadline <= now]:
                    selector.unregister(each.stdout)
                    running.remove(each)
                    answers[each.host] = each.answer()
                    if logins is None or not each.has_answered or _key(each.host) in logins:
                        each.close()
                    else:
                        logins[_key(each.host)] = each
                    new.add(each.host)
                    show_at = min(show_at, now + _TOGETHER_S)
                if new and (time.monotonic() >= show_at or not (waiting or running)):
                    show({host: answers[host] for host in hosts if host in new})
                    new, show_at = set(), math.inf
    finally:
        for each in running:
            each.close()
    return {host: answers[host] for host in hosts}


def other_hosts(hosts: Sequence[Host]) -> list[Host]:
    """The hosts that are not this machine."""
    resolve_all([host.name for host in hosts])
    return [host for host in hosts if not is_this_host(host.name)]


def logins_at_once(hosts: Sequence[Host], transport: Transport = SSH) -> int:
    """How many logins may go on at once. The first and the last host tell whether a jump host is between."""
    if len(hosts) > MOST_BEHIND_JUMP and transport.is_ssh:
        for host in (hosts[0], hosts[-1]):
            config = tool_output("ssh", ("-G", "--", host.ssh_target), None, _CONFIG_S) or ""
            is_behind = re.search(r"(?m)^proxy(?:jump|command) (?!none$)", config)
            if is_behind and not is_this_host(host.name):
                return MOST_BEHIND_JUMP
    return MOST_LOGINS


def shell_command(host: Host, line: str, transport: Transport, config: str) -> list[str]:
    """The command that runs `line` in a Bourne shell on `host`. `line` must hold no input and no newline.

    `config` is the path of ssh's configuration.
    """
    if is_this_host(host.name):
        return ["sh", "-c", line]
    # A user's login shell may not be a Bourne shell: fish, or csh, whose quotes end with the line.
    line = f"exec sh -c {shlex.quote(line)}"
    if not transport.is_ssh:
        return [*transport.agent, host.name, line]
    # "--" ends ssh's options. The hostfile's grammar already refuses names that begin with a dash.
    return ["ssh", "-F", config, "-T", "--", host.alias, line]


def ssh_config(hosts: Sequence[Host], transport: Transport = SSH) -> str:
    """ssh's configuration for a job: the users and ports of the hostfile, ours, and then the user's own.

    A block of the user for a host applies, because ssh gets the host's own name: only an IPv6 address has
    another one for mpirun.
    """
    blocks = ""
    for host in hosts:
        address = host.name if ":" in host.name else None
        own = {"HostName": address, "User": host.user, "Port": host.port}
        if lines := "".join(f"  {key} {value}\n" for key, value in own.items() if value):
            blocks += f"Host {host.alias}\n{lines}"
    return blocks + _SETTINGS.format(connect_s=transport.connect_s)


@contextmanager
def config_file(hosts: Sequence[Host], transport: Transport = SSH) -> Iterator[str]:
    """The path of a file with `ssh_config`, which exists as long as the body lasts."""
    with unnamed_file(ssh_config(hosts, transport).encode()) as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"  # ssh closes what it inherits


def unnamed_file(content: bytes = b"") -> BinaryIO:
    """A file in memory, because a disk may be full. A Python without memfd_create, as uv's, uses the disk."""
    memory = hasattr(os, "memfd_create")
    file = os.fdopen(os.memfd_create("mpiddp"), "w+b") if memory else TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


class Login:
    """A login on one host, for one program or, if it stays open, for several of Python."""

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        self.deadline, self._work_s = math.inf, 0.0
        self.output = bytearray()  # of the present program
        self.has_begun = False
        # stdin is a socket: a user with many pipes gets pipes that are smaller than a program. stderr is a
        # file: a connection that ssh keeps (ControlPersist) may hold it open for long.
        self._stdin, theirs = socket.socketpair()
        with theirs, unnamed_file() as errors:
            self._stderr = os.dup(errors.fileno())
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=self._stderr
            )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def ask(
        self, program: str, input: str, login_s: float, work_s: float, *, stays_open: bool
    ) -> None:
        """Send the next program. It has `work_s`, and before the login is done `login_s` more."""
        self._work_s, text = work_s, input.encode()
        size = b"%d\n" % len(text) if stays_open else b""
        first = f"{program}\n{_READ_ON if stays_open else ''}\n".encode()
        self.deadline = time.monotonic() + (work_s if self.has_begun else login_s)
        self.output[:] = f"{LOGIN}\n".encode() if self.has_begun else b""
        self._stdin.settimeout(login_s if login_s < math.inf else None)
        with suppress(OSError):  # then no answer comes
            self._stdin.sendall((b"" if self.has_begun else first) + size + text)
            if not stays_open:
                self._stdin.shutdown(socket.SHUT_WR)

    def read(self) -> bool:
        """Read what has arrived. Returns whether more may come."""
        chunk = os.read(self.stdout.fileno(), 65536)
        self.output += chunk
        if not self.has_begun and f"{LOGIN}\n".encode() in self.output:
            self.has_begun = True
            self.deadline += self._work_s
        return bool(chunk) and not self.has_answered

    @property
    def has_answered(self) -> bool:
        return self.output.endswith(_ANSWERED.encode())

    def answer(self) -> Answer:
        exit_code = 0 if self.has_answered else None
        if exit_code is None:
            with suppress(subprocess.TimeoutExpired):
                exit_code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        errors = os.pread(self._stderr, os.fstat(self._stderr).st_size, 0).decode(errors="replace")
        before, _, stdout = self.output.decode(errors="replace").partition(f"{LOGIN}\n")
        stdout = stdout.removesuffix(_ANSWERED)
        return Answer(exit_code, stdout, errors, self.has_begun, before, time.time())

    def close(self) -> None:
        self._stdin.close()
        self.stdout.close()
        if is_this_host(self.host.name):  # as over ssh, the program sees that nobody reads any more
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        self.process.kill()
        self.process.wait()
        os.close(self._stderr)


class Logins(dict[str, Login]):
    """Logins that stay open for further programs, by `_key`."""

    def close(self) -> None:
        while self:
            self.popitem()[1].close()


def _key(host: Host) -> str:
    """The host's key, however the job names this machine."""
    return "" if is_this_host(host.name) else host.key


# What ssh prints where a jump host (ProxyJump) fails: the reason, then that the host said nothing. Where only
# the host behind it is not reached, ssh says "stdio forwarding failed" before.
_JUMP_FAILED = (
    r"(?m)^(?!Warning: |stdio forwarding failed)(.+?)\.?\n"
    r"kex_exchange_identification: .*\n.* UNKNOWN port 65535"
)
# What the sshd of a jump host answers where it cannot, or may not, reach the host behind it.
_NOT_BEHIND = (
    r"(?m)^channel \d+: open failed: (?!connect failed: Connection refused)(?:connect failed: )?"
    r"(.+?)\.?$"
)
_GONE = "Check that the host is on and the network is up."
_DENIED = r"^\S+: Permission denied \(([^)]*)\)"
# A pattern of ssh's own lines (the host's banner may say anything), and the sentence for it. The first row
# that matches counts.
_COMPLAINTS = {
    _JUMP_FAILED: "ssh {name}: the jump host on the way failed ({0}). Try: {ssh} true",
    _NOT_BEHIND: "ssh {name}: the jump host on the way does not reach it ({0}). Try: {ssh} true",
    "^ssh: Could not resolve hostname": "{name}: cannot be resolved from {here}. "
    "Add it to DNS or /etc/hosts.",
    "IDENTIFICATION HAS CHANGED": "ssh {name}: its host key has changed. Check that it is the same host, "
    "then run: ssh-keygen -R {known}",
    "^Host key verification failed": "ssh {name}: its host key is unknown. Check it, then: "
    "ssh-keyscan {port}{name} >> ~/.ssh/known_hosts",
    r"^Permissions \d+ for '(.+)' are too open": "ssh {name}: ssh does not use the key {0}, because others "
    "can read it. Run: chmod 600 {0}",
    _DENIED: "ssh {name}: permission denied ({0}). Run: ssh-copy-id {port}{target}",
    "^(ssh: connect to host .*|channel .* failed): Connection refused": "ssh {name}: connection refused. "
    "Start sshd there, or give its port in the hostfile: {name} port=N",
    "^ssh: connect to host .*: (No route to host|Network is unreachable)": "ssh {name}: no route from "
    f"{{here}}. {_GONE}",
    "^Timeout, server .* not responding": f"ssh {{name}}: it does not answer any more. {_GONE}",
    r"^(ssh: connect to host .*: |)(Connection|Operation)( to \S+ port \d+)? timed out": "ssh {name}: no "
    f"answer in {{connect}} s. {_GONE}",
}


def ssh_complaint(host: Host, errors: str, transport: Transport = SSH) -> str:
    """The sentence for ssh's own error, with the command that fixes it."""
    lines = errors.strip().splitlines()  # ssh ends them with \r\n
    port, ssh = (f"-p {host.port} " if host.port else ""), ssh_line(host)
    words = {"name": host.name, "target": host.ssh_target, "port": port, "ssh": ssh}
    words |= {"here": socket.gethostname(), "connect": str(transport.connect_s)}
    words["known"] = f"'[{host.name}]:{host.port}'" if host.port else host.name
    for pattern, sentence in _COMPLAINTS.items():
        if found := re.search(pattern, "\n".join(lines), re.MULTILINE):
            if pattern == _DENIED and (key := _locked_key(host)):
                agent = "" if os.environ.get("SSH_AUTH_SOCK") else 'eval "$(ssh-agent)"; '
                why = f"the key {key} has a passphrase, and no agent holds it"
                return f"ssh {host.name}: {why}. Run: {agent}ssh-add {key}"
            return sentence.format(*found.groups(), **words)
    if not lines:  # a LogLevel of the user may hide them
        return f"ssh {host.name} failed: no output. Try: {ssh.replace('ssh', 'ssh -v', 1)} true"
    return f"ssh {host.name} failed: {lines[-1]}. Try: {ssh} true"


def _locked_key(host: Host) -> str:
    """The first key for the host that needs a passphrase and that no agent holds, "" if there is none."""
    config = tool_output("ssh", ("-G", "--", host.ssh_target), None, _CONFIG_S) or ""
    keys = (os.path.expanduser(each) for each in re.findall("(?m)^identityfile (.+)$", config))  # noqa: PTH111
    return next(filter(_is_locked, keys), "")


@cache
def _is_locked(key: str) -> bool:
    def output(program: str, *arguments: str) -> str:
        return tool_output(program, arguments, None, _CONFIG_S) or ""

    known = output("ssh-keygen", "-l", "-f", key).split(" ")[1:2]  # its fingerprint
    is_open = output("ssh-keygen", "-y", "-P", "", "-f", key)
    return bool(known) and not is_open and known[0] not in output("ssh-add", "-l")


def no_answer(
    host: Host,
    program: str,
    answer: Answer,
    limit_s: float | None,  # None: the transport's
    fix: str,
    transport: Transport = SSH,
) -> str:
    """The sentence for a program that has not answered. `fix` is that for a host without it."""
    limit_s = transport.login_s if limit_s is None else limit_s
    if answer.exit_code == NO_PROGRAM:
        return f"{host.name}: {program} is missing. {fix}"
    if answer.has_begun and answer.exit_code is None:
        hint = f"The host is gone, or a file server does not answer. Try: {ssh_line(host)} df"
        return f"{host.name}: {program} has started there, and does not end in time. {hint}"
    if answer.has_failed_there:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.exit_code}"])[-1]
        return f"{host.name}: {program} does not run there: {last.rstrip('.')}."
    if not transport.is_ssh:
        unsaid = [f"no answer in {limit_s:g} s" if answer.exit_code is None else "no output"]
        reason = (answer.stderr.strip().splitlines() or unsaid)[-1].rstrip(".")
        return (
            f"{transport.name} {host.name} failed: {reason}. "
            f"Where ssh is allowed, it can be used instead: {transport.instead}"
        )
    if answer.exit_code is None:
        slow = f"If its logins are slow: --login-timeout {2 * limit_s:.0f}s"
        return f"ssh {host.name}: no answer in {limit_s:g} s. Try: {ssh_line(host)} true. {slow}"
    printed = answer.printed_before.strip().splitlines()
    if answer.exit_code != 255 and not answer.has_begun and (printed or answer.exit_code == 0):
        why = f"the host runs another command, which prints: {shown([*printed, 'nothing'][0].rstrip('.'))}"
        return (
            f"ssh {host.name}: {why}. See ForceCommand in its sshd_config, and its start-up files."
        )
    return ssh_complaint(host, answer.stderr, transport)


def ssh_line(host: Host) -> str:
    """The command that a person types to log in."""
    return f"ssh {f'-p {host.port} ' if host.port else ''}{host.ssh_target}"
