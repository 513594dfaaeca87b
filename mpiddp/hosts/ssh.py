"""Run a program of Python on many hosts at once over ssh, or another transport, and collect their answers.

program = program_that_prints((interfaces, gpus, facts), "links()")
answers = ask_hosts(hosts, program, work_s=30)

A host has none of our modules: the program brings their sources along. All connections of a job have one ssh
configuration, `ssh_config`, over the user's own. ssh never prompts the user. It checks host keys as the user
has configured. What ssh itself complains about becomes a sentence with the command that fixes it.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import BinaryIO

from mpiddp.errors import UserError
from mpiddp.hosts import jump
from mpiddp.hosts.complaints import NO_PROGRAM, Answer
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.transport import SSH, Transport

_MOST_LOGINS = 32  # that have not begun
_NO_SSH = "ssh is not installed here. Run: sudo apt-get install openssh-client."
_LONGEST_WAIT_S = 3600.0  # epoll accepts no infinite time
_FILES_PER_HOST = 3  # stdin's socket, stdout's pipe and stderr's file
_END_S = 4.0  # for a program on this machine to end
OUTPUT_LIMIT = 16 << 20  # bytes of an answer, for a command that prints without end
_TOGETHER_S = 1.0  # lines that come within this time are shown together
_MOST_UNSHOWN = 1 << 20  # bytes of a host, which are shown at once

# The command of the shell on each host. It is the same for every host and every user: Python's name comes
# through stdin, so that no shell interprets a part of a hostfile or of a path. mpirun's daemon starts in the
# same kind of shell: not a login shell, not interactive, no activated environment. Python starts in the root
# folder, because it imports modules from its working folder. It gets one program after the other, each behind
# a line with its size, and with the line that it prints behind the answer.
LOGIN = "mpiddp-login"  # the line that proves the login; start-up files may print before it
_ANSWERED = f"mpiddp-answered-{os.urandom(8).hex()}"
_READ_ON = (
    "import sys; stdin = sys.stdin.buffer; [(exec(stdin.read(int(size)), {}), "
    "print(end.decode(), flush=True)) for size, end in map(bytes.split, iter(stdin.readline, bytes()))]"
)
_SHELL_LINE = (
    f"echo {LOGIN}; while IFS= read -r line; do case $line in python=*) break ;; esac; done; "
    f'python=${{line#python=}}; command -v "$python" >/dev/null 2>&1 || exit {NO_PROGRAM}; '
    f'cd / && exec "$python" -c "{_READ_ON}"'
)
# A user's login shell may not be a Bourne shell: fish, or csh, whose quotes end with the line. All of them
# pass a line without single quotes on to sh.
_ANY_SHELL_LINE = f"exec sh -c '{_SHELL_LINE}'"
ANY_SHELL_SSH = Path(__file__).with_name("any_shell_ssh.sh")  # the same for mpirun
# Before LOGIN has come, only start-up files of the login shell read stdin. A file that asks a question gets
# an empty line. If a file has started another shell, as with `exec zsh -l`, that shell gets the line.
_FOR_START_UP_FILES = ("\n" * 8 + _ANY_SHELL_LINE + "\n").encode()

# Of all connections of a job, before the settings of the user. ssh takes the first value that it finds. A job
# whose ssh became the master (ControlMaster) would end the user's own logins with its own; it may use one.
# Without a sign of the host, ssh gives up after `signs` intervals. A host that looks up a user gives none.
_SETTINGS = """\
Host *
  BatchMode yes
  ConnectTimeout {connect_s}
  ServerAliveInterval 3
  ServerAliveCountMax {signs}
  ControlMaster no
  ClearAllForwardings yes
  RemoteCommand none
  RequestTTY no
  Include ~/.ssh/config
  Include /etc/ssh/ssh_config
"""


# The first lines of each program.
CHECK_PYTHON = """
import sys
if sys.version_info < (3, 8):
    sys.exit("it is Python %d.%d, and 3.8 or newer is needed" % sys.version_info[:2])
"""
_LOAD = """
import types
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def program_that_prints(modules: Sequence[ModuleType], call: str) -> str:
    """A program that prints the JSON of a call of a function of the last one of `modules`. It is ASCII.

    Each module stands after those that it imports.
    """
    sources: dict[str, str] = {}
    for module in modules:
        # The names by which they import each other, with empty parent packages.
        for name in accumulate(module.__name__.split("."), "{}.{}".format):
            sources.setdefault(name, "")
        sources[module.__name__] = Path(str(module.__file__)).read_text(encoding="utf-8")
    then = f"import json; print(json.dumps(sys.modules[{modules[-1].__name__!r}].{call}))"
    return f"{CHECK_PYTHON}\nSOURCES = {sources!a}\n{_LOAD}{then}\n"


def ask_hosts(
    hosts: Sequence[Host],
    program: str,
    *,
    python: str = "python3",  # a path or a name
    work_s: float | None = None,  # for each host, once its login is done; None: as a login
    transport: Transport = SSH,
    logins: Logins | None = None,  # open ones; those that answer remain open
    # Gets the whole lines that have come within a second, as answers without an exit code, and the rest of
    # hosts that have ended, which are its second argument; at Ctrl-C all that there is.
    show: Callable[[Mapping[Host, Answer], Collection[Host]], None] | None = None,
) -> dict[Host, Answer]:
    """Run `program`, the text of one, on all hosts at the same time.

    This machine runs the program directly. A login that is dropped before it has begun is tried again. A
    process that still runs at its deadline is killed on this side, as is one that prints more than
    OUTPUT_LIMIT. An answer lacks what `show` has got. Raises UserError if ssh is not installed here; a
    scheduler's own program is used only where it is.
    """
    if (others := other_hosts(hosts)) and not transport.is_installed:
        raise UserError(f"{_NO_SSH} {transport.hint}".rstrip())
    kept = logins if transport.is_ssh else None  # that of a scheduler may want the end of stdin
    allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
    work_s = transport.login_s if work_s is None else work_s
    waiting, running = [*reversed(hosts)], list[Login]()
    answers, new = dict[Host, Answer](), dict[Host, Answer]()
    show_at = math.inf
    try:
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            direct = stack.enter_context(config_file(hosts, transport, shares_jumps=False))
            if transport.is_ssh:
                jump.share(others, direct, transport.login_s)
            config = stack.enter_context(config_file(hosts, transport))

            def ask(host: Host, login: Login, until: float = math.inf) -> None:
                login.ask(host, program, work_s, is_last=kept is None)
                login.deadline = min(login.deadline, until)
                running.append(login)
                selector.register(login.stdout, selectors.EVENT_READ, login)

            while waiting or running:
                pending = sum(not login.has_begun for login in running)
                for _ in range(min(len(waiting), _MOST_LOGINS - pending)):
                    host = waiting.pop()
                    login = kept.pop(host.key, None) if kept else None
                    ask(host, login or Login(host, python, transport, config))
                wait_s = min(show_at, *(login.deadline for login in running)) - time.monotonic()
                # Nothing tells of new lines on stderr.
                longest_s = _LONGEST_WAIT_S if show is None else _TOGETHER_S
                events = selector.select(min(max(0.0, wait_s), longest_s))
                ended = [key.data for key, _ in events if not key.data.read()]
                now = time.monotonic()
                for login in [
                    login for login in running if login in ended or login.deadline <= now
                ]:
                    selector.unregister(login.stdout)
                    running.remove(login)
                    answer = login.answer()
                    if (again := login.again(answer.stderr, config, direct)) is not None:
                        ask(login.host, again, login.deadline)
                        continue
                    new[login.host] = answers[login.host] = answer
                    if kept is not None and login.has_answered:
                        kept[login.host.key] = login
                    else:
                        login.close()
                if show is not None and (new or any(login.unshown for login in running)):
                    is_much = any(login.unshown > _MOST_UNSHOWN for login in running)
                    show_at = now if is_much else min(show_at, now + _TOGETHER_S)
                if show is not None and (now >= show_at or not (waiting or running)):
                    news = {login.host: login.lines() for login in running if login.has_begun} | new
                    show({host: news[host] for host in hosts if host in news}, [*new])
                    new, show_at = {}, math.inf
    except KeyboardInterrupt:  # what has come may be all that the user has waited for
        for login in [login for login in running if login.has_begun]:
            login.deadline = 0.0
            new[login.host] = replace(login.answer(), exit_code=None)
        if show is not None:
            show(new, [*new])
        raise
    finally:
        for login in running:
            login.close()
    return {host: answers[host] for host in hosts}


def other_hosts(hosts: Sequence[Host]) -> list[Host]:
    """The hosts that are not this machine."""
    resolve_all([host.name for host in hosts])
    return [host for host in hosts if not is_this_host(host.name)]


def _login_command(host: Host, transport: Transport, config: str) -> list[str]:
    """The command that runs _SHELL_LINE on a host. `config` is the path of ssh's configuration."""
    if is_this_host(host.name):
        return ["sh", "-c", _SHELL_LINE]
    if not transport.is_ssh:
        return [*transport.agent, host.name, _ANY_SHELL_LINE]
    # "--" ends ssh's options. The hostfile's grammar already refuses names that begin with a dash.
    return ["ssh", "-F", config, "-T", "--", host.alias, _ANY_SHELL_LINE]


def ssh_config(
    hosts: Sequence[Host], transport: Transport = SSH, *, shares_jumps: bool = True
) -> str:
    """ssh's configuration for a job: the users and ports of the hostfile, ours, and then the user's own.

    A block of the user for a host applies, because ssh gets the host's own name: only an IPv6 address has
    another one for mpirun. With `shares_jumps`, logins share this process's connections to jump hosts.
    """
    blocks = jump.shared() if shares_jumps else ""
    for host in hosts:
        address = host.name if ":" in host.name else None
        settings = {"HostName": address, "User": host.user, "Port": host.port}
        if lines := "".join(f"  {key} {value}\n" for key, value in settings.items() if value):
            blocks += f"Host {host.alias}\n{lines}"
    signs = math.ceil(max(transport.silence_s, transport.login_s) / 3)
    return blocks + _SETTINGS.format(connect_s=transport.connect_s, signs=signs)


@contextmanager
def config_file(
    hosts: Sequence[Host], transport: Transport = SSH, *, shares_jumps: bool = True
) -> Iterator[str]:
    """The path of a file with `ssh_config`, which exists as long as the body lasts.

    By it, ssh says why a login fails, even if the user's own LogLevel is QUIET.
    """
    text = "LogLevel INFO\n" + ssh_config(hosts, transport, shares_jumps=shares_jumps)
    with unnamed_file(text.encode()) as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"  # ssh closes what it inherits


def unnamed_file(content: bytes = b"") -> BinaryIO:
    """A file in memory, because a disk may be full. A Python without memfd_create, as uv's, uses the disk."""
    memory = hasattr(os, "memfd_create")
    file = os.fdopen(os.memfd_create("mpiddp"), "w+b") if memory else TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


class Login:
    """A login on one host, for one program after the other. It begins after `pause_s`."""

    def __init__(
        self, host: Host, python: str, transport: Transport, config: str, pause_s: float = 0.0
    ) -> None:
        self._python, self._transport = python, transport
        self._to_send, self._is_last = _FOR_START_UP_FILES, False
        self.deadline, self._work_s = math.inf, 0.0
        self.has_begun = False  # the login has succeeded
        self._before = bytearray()  # what was printed until then
        self.output = bytearray()  # of the present program
        # stdin is a socket: a user with many pipes gets pipes that are smaller than a program. stderr is a
        # file: a connection that ssh keeps (ControlPersist) may hold it open for long.
        self._stdin, theirs = socket.socketpair()
        self._stderr, self._shown_errors = unnamed_file(), 0
        command = _login_command(host, transport, config)
        if pause_s:
            command = ["sh", "-c", f'sleep {pause_s}; exec "$@"', "sh", *command]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=self._stderr
            )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self._stdin.settimeout(transport.login_s)
        self._send()
        self._to_send = f"python={python}\n".encode()

    @property
    def has_answered(self) -> bool:
        return self.output.endswith(f"{_ANSWERED}\n".encode())

    def ask(self, host: Host, program: str, work_s: float, *, is_last: bool) -> None:
        """Send the next program. It has `work_s`, after the login is done."""
        self.host, self._work_s = host, work_s  # another one of the same name
        wait_s = work_s if self.has_begun else self._transport.login_s
        self.deadline = time.monotonic() + wait_s
        text = program.encode()
        self._to_send += f"{len(text)} {_ANSWERED}\n".encode() + text
        self._is_last = is_last
        self.output.clear()
        if self.has_begun:
            self._send()

    def _send(self) -> None:
        data, self._to_send = self._to_send, b""
        with suppress(OSError):  # then no answer comes
            self._stdin.sendall(data)
            if self._is_last:
                self._stdin.shutdown(socket.SHUT_WR)

    def read(self) -> bool:
        """Read what has arrived. Returns whether more may come."""
        chunk = os.read(self.stdout.fileno(), 65536)
        (self.output if self.has_begun else self._before).extend(chunk)
        line = f"{LOGIN}\n".encode()
        if not self.has_begun and line in self._before:
            self._before, _, self.output = self._before.partition(line)
            self.has_begun = True
            self.deadline = time.monotonic() + self._work_s
            self._send()
        if len(self.output) > OUTPUT_LIMIT:
            self.deadline = 0.0
            return False
        return bool(chunk) and not self.has_answered

    @property
    def unshown(self) -> int:
        """The bytes of its output that have arrived since `lines` was called."""
        return len(self.output) + os.fstat(self._stderr.fileno()).st_size - self._shown_errors

    def lines(self) -> Answer:
        """The whole lines that have arrived since the last call, or a part of a very long one."""
        errors = self._new_errors()
        parts = [
            text if len(text) > _MOST_UNSHOWN else text[: text.rfind(b"\n") + 1]
            for text in (bytes(self.output), errors)
        ]
        del self.output[: len(parts[0])]
        self._shown_errors += len(parts[1])
        if self._shown_errors > OUTPUT_LIMIT:  # they stay in memory
            self.deadline = 0.0
        return self._answer(None, *parts)

    def answer(self) -> Answer:
        """The rest, with the exit code of the program."""
        exit_code = 0 if self.has_answered else None
        if exit_code is None:
            with suppress(subprocess.TimeoutExpired):
                exit_code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        printed = bytes(self.output).removesuffix(f"{_ANSWERED}\n".encode())
        return self._answer(exit_code, printed, self._new_errors())

    def _new_errors(self) -> bytes:
        return os.pread(self._stderr.fileno(), 2 * OUTPUT_LIMIT, self._shown_errors)

    def _answer(self, exit_code: int | None, *printed: bytes) -> Answer:
        output, errors, before = (
            text.decode(errors="replace") for text in (*printed, bytes(self._before))
        )
        asked = (self.host, self._python, self._transport)
        return Answer(*asked, exit_code, output, errors, self.has_begun, before)

    def again(self, errors: str, config: str, direct: str) -> Login | None:
        """Another login, if this one was dropped before it began, and there is time for another.

        `direct` is a configuration in which it shares no connection: then ssh says why a jump host refuses.
        """
        has_time = time.monotonic() + 2 * jump.PAUSE_S < self.deadline
        if self.has_begun or not has_time or not jump.was_dropped(errors):
            return None
        self.close()
        way = direct if jump.NOT_SHARED in errors else config
        return Login(self.host, self._python, self._transport, way, pause_s=jump.PAUSE_S)

    def close(self) -> None:
        self._stdin.close()
        self.stdout.close()
        ends_s = 0.0
        if is_this_host(self.host.name):  # as over ssh, the program sees that nobody reads any more
            ends_s = _END_S
        elif self.has_answered and not self._transport.is_ssh:
            # Grid Engine kills a job one of whose qrsh is killed.
            ends_s = max(_END_S, self.deadline - time.monotonic())
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ends_s)
        self.process.kill()
        self.process.wait()
        self._stderr.close()


class Logins(dict[str, Login]):
    """Logins that remain open for further programs, by the keys of their hosts."""

    def close(self) -> None:
        while self:
            self.popitem()[1].close()
