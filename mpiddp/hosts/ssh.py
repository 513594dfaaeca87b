"""Run a program of Python on many hosts at once over ssh, or another transport, and collect their answers.

program = program_that_prints((interfaces, gpus, facts), "links()")
answers = ask_hosts(hosts, program, work_s=30)

A host needs none of our modules, because the program brings their sources along. All connections of a job
have one ssh configuration, `ssh_config`, which includes the user's own. So ssh checks host keys as the user
wants, but it never asks a question. An error of ssh becomes a sentence with the command that fixes it.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO

from mpiddp.errors import UserError
from mpiddp.hosts import jump
from mpiddp.hosts.complaints import NO_PROGRAM, Answer
from mpiddp.hosts.gpus import tool_output
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.processes import OPEN_BESIDES, allow_open
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import FIX

_MOST_LOGINS = 32  # that wait for their hosts at the same time
_FILES_PER_HOST = 3  # a login has a socket and two pipes
_END_S = 4.0  # a program on this machine gets this time to end by itself
_ENDS_STEP_S = 1.0  # a scheduler's program gets this time to end its task
OUTPUT_LIMIT = 16 << 20  # bytes; a program that prints more is killed: it may print for ever
_LONGEST_WAIT_S = 3600.0  # a selector takes no infinity
_POLL_S = 0.005  # to see that a program has ended
_TOGETHER_S = 1.0  # lines that come within this time are shown together
_MOST_UNSHOWN = 1 << 20  # bytes; if a host has printed more, they are shown without waiting

# The command of the shell on each host. It is the same for every host and every user: Python's name and its
# LD_LIBRARY_PATH come through stdin, so that no shell interprets a part of a hostfile or of a path. mpirun's daemon starts in the
# same kind of shell: not a login shell, not interactive, no activated environment. Python starts in the root
# folder, because it imports modules from its working folder. Then it reads programs from stdin. Before each
# program comes a line with its size and with the word that Python has to print after the program's output.
LOGIN = "mpiddp-login"  # the line that proves the login; start-up files may print before it
_ANSWERED = b"mpiddp-answered-%s\n" % os.urandom(8).hex().encode()
_READ_ON = (
    "import sys; stdin = sys.stdin.buffer; [(exec(stdin.read(int(size)), {}), "
    "print(end.decode(), flush=True)) for size, end in map(bytes.split, iter(stdin.readline, bytes()))]"
)
_SHELL_LINE = (
    f"echo {LOGIN}; while IFS= read -r line; do case $line in python=*) break ;; esac; done; "
    f'python=${{line#python=}}; [ -e "$python" ] || command -v "$python" >/dev/null 2>&1 || exit {NO_PROGRAM}; '
    'IFS= read -r libraries; [ -z "$libraries" ] || export LD_LIBRARY_PATH="$libraries"; '
    f'cd / && exec "$python" -c "{_READ_ON}"'
)
# A user's login shell may be fish or csh, but any shell passes one line without single quotes on to sh.
_ANY_SHELL_LINE = f"exec sh -c '{_SHELL_LINE}'"
ANY_SHELL_SSH = Path(__file__).with_name("any_shell_ssh.sh")  # ssh for mpirun, which does the same
# Before LOGIN has come, only start-up files of the login shell read stdin. A file that asks a question gets
# an empty line. If a file has started another shell, for example by `exec bash -l`, that shell gets the line.
_FOR_START_UP_FILES = ("\n" * 8 + _ANY_SHELL_LINE + "\n").encode()

# ssh takes the first value that it finds for a setting, so these stand before the user's own. If an ssh of a
# job became a master (ControlMaster), its end would also end logins of the user that share it. ssh gives up a
# host that has sent nothing for `signs` intervals: while sshd looks up a user, it sends nothing.
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
"""

# Each program begins with these lines.
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
    """A program, in ASCII, that calls a function of the last one of `modules` and prints the result as JSON.

    Each module stands after the modules that it imports.
    """
    sources: dict[str, str] = {}
    for module in modules:
        # The modules import each other by their full names, so each parent package exists, but is empty.
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
    work_s: float | None = None,  # for each host, after its login; None: as long as a login
    transport: Transport = SSH,
    logins: Logins | None = None,  # are used again; those of hosts that answer remain open
    # Called about once a second with the whole lines that have come meanwhile, as answers without an exit
    # code. The second argument has the hosts that have ended: their answers are complete.
    show: Callable[[Mapping[Host, Answer], Collection[Host]], None] | None = None,
) -> dict[Host, Answer]:
    """Run `program`, which is source text, on all hosts at the same time.

    This machine runs the program without a login. A login that is dropped before it has begun is tried again.
    At its deadline, or if it prints more than OUTPUT_LIMIT, a login is killed on this side. An answer has
    only the output that `show` has not got. Raises UserError if ssh is not installed here.
    """
    if (others := other_hosts(hosts)) and not transport.is_installed:
        fix = f"\n{FIX}".join(filter(None, ("sudo apt-get install openssh-client", transport.hint)))
        raise UserError("ssh is not installed here.", fix=fix)
    kept = logins if transport.keeps_open else None
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
                for stream in (login.stdout, login.stderr):
                    selector.register(stream, selectors.EVENT_READ, (login, stream))

            while waiting or running:
                pending = sum(not login.has_begun for login in running)
                for _ in range(min(len(waiting), _MOST_LOGINS - pending)):
                    host = waiting.pop()
                    login = kept.pop(host.key, None) if kept else None
                    if (
                        login is None or login.process.poll() is not None
                    ):  # its network was down meanwhile
                        login = Login(host, python, transport, config)
                    ask(host, login)
                wait_s = min(login.deadline for login in running) - time.monotonic()
                wait_s = min(wait_s, show_at - time.monotonic(), _LONGEST_WAIT_S)
                ended = list[Login]()
                for key, _ in selector.select(max(0.0, wait_s)):
                    login, stream = key.data
                    if not login.read(stream):
                        selector.unregister(stream)
                        ended += [login] * (stream is login.stdout)
                now = time.monotonic()
                for login in [
                    login for login in running if login in ended or login.deadline <= now
                ]:
                    for stream in (login.stdout, login.stderr):
                        with suppress(KeyError):  # it is at its end
                            selector.unregister(stream)
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
    except KeyboardInterrupt:  # the user may have seen enough, and gets all lines until now
        for login in running:
            login.deadline = 0.0  # do not wait for its end
        new |= {login.host: login.answer() for login in running if login.has_begun}
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


def ssh_config(
    hosts: Sequence[Host], transport: Transport = SSH, *, shares_jumps: bool = True
) -> str:
    """ssh's configuration for a job: the users and ports of the hostfile, _SETTINGS, and then the user's own.

    A user's block "Host node1" applies, because ssh is called with the name in the hostfile. An IPv6 address and
    a host `apart` have another one (`Host.alias`): for this, the block needs "Host node1-2201". With
    `shares_jumps`, logins share this process's connections to jump hosts.
    """
    blocks = jump.shared() if shares_jumps else ""
    for host in hosts:
        address = host.address or (host.name if ":" in host.name else None)
        settings = {"HostName": address, "User": host.user, "Port": host.port}
        if lines := "".join(f"  {key} {value}\n" for key, value in settings.items() if value):
            blocks += f"Host {host.alias}\n{lines}"
    signs = math.ceil(max(transport.silence_s, transport.login_s) / 3)
    ours = _SETTINGS.format(connect_s=transport.connect_s, signs=signs)
    return f"{blocks}{ours}{_of_machine()}"


@cache
def _of_machine() -> str:
    """The line that includes the file of the machine that this ssh reads by itself.

    The ssh of conda, Nix or Spack has a file of its own, and may not know an option in that of the system.
    """
    options = ("-vG", "localhost")  # ssh asks no host
    text = tool_output("ssh", options, None, _END_S, stderr=subprocess.STDOUT) or ""
    # It reads the user's files first. The files that this one includes have other names.
    files = re.findall("(?m)^debug1: Reading configuration data (/.*/ssh_config)\r?$", text)
    return "".join(f"  Include {file}\n" for file in files[-1:])


@contextmanager
def config_file(
    hosts: Sequence[Host], transport: Transport = SSH, *, shares_jumps: bool = True
) -> Iterator[str]:
    """The path of a file with `ssh_config` for logins of this process. It exists as long as the body lasts.

    ssh says why a login fails, even if the user's own LogLevel is QUIET. It gives up a silent host in
    seconds: `silence_s` is for mpirun's logins, which last as long as the job.
    """
    transport = transport._replace(silence_s=SSH.silence_s)
    text = "LogLevel INFO\n" + ssh_config(hosts, transport, shares_jumps=shares_jumps)
    # In memory, because a disk may be full. A Python of uv uses the disk: it has no memfd_create.
    memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("mpiddp"), "w+b") if memory else TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"  # ssh closes inherited files


class Login:
    """A login on one host, which runs one program after the other. It begins after `pause_s`."""

    def __init__(
        self, host: Host, python: str, transport: Transport, config: str, pause_s: float = 0.0
    ) -> None:
        self._python, self._transport = python, transport
        self._to_send, self._is_last = _FOR_START_UP_FILES, False
        self.deadline, self._work_s = math.inf, 0.0
        self.has_begun = False  # whether the login has succeeded
        self._before = bytearray()  # the output of start-up files, before the login
        self.output = bytearray()  # of the present program, as far as `lines` has not returned it
        # stdin is a socket, because a user with many pipes gets pipes that are smaller than a program.
        self._stdin, theirs = socket.socketpair()
        self.errors = bytearray()  # the same of stderr, with what ssh has printed before the login
        if is_this_host(host.name):
            command = ["sh", "-c", _SHELL_LINE]
        elif transport.is_ssh:
            # "--" ends ssh's options. The hostfile's grammar already refuses names that begin with a dash.
            command = ["ssh", "-F", config, "-T", "--", host.alias, _ANY_SHELL_LINE]
        else:
            command = [*transport.agent, host.name, *transport.shell, _ANY_SHELL_LINE]
        if pause_s:
            command = ["sh", "-c", f'sleep {pause_s}; exec "$@"', "sh", *command]
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=transport.environment(os.environ),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.stdout, self.stderr = self.process.stdout, self.process.stderr
        for stream in (self.stdout, self.stderr):
            os.set_blocking(stream.fileno(), False)
        self._stdin.settimeout(transport.login_s)
        self._send()
        # Another Python than the job's may start with the libraries of its host alone.
        libraries = (
            transport.libraries if os.sep in python and "\n" not in transport.libraries else ""
        )
        self._to_send = os.fsencode(f"python={python}\n{libraries}\n")

    @property
    def has_answered(self) -> bool:
        return self.output.endswith(_ANSWERED)

    def ask(self, host: Host, program: str, work_s: float, *, is_last: bool) -> None:
        """Send the next program. It has `work_s`, after the login is done."""
        self.host, self._work_s = host, work_s  # a restart may have another Host of the same name
        wait_s = work_s if self.has_begun else self._transport.login_s
        self.deadline = time.monotonic() + wait_s
        text = program.encode()
        self._to_send += b"%d %b%b" % (len(text), _ANSWERED, text)
        self._is_last = is_last
        self.output.clear()
        if self.has_begun:
            self._send()

    def _send(self) -> None:
        data, self._to_send = self._to_send, b""
        with suppress(OSError):  # the login has ended, which `read` will see
            self._stdin.sendall(data)
            if self._is_last:
                self._stdin.shutdown(socket.SHUT_WR)

    def read(self, stream: IO[bytes]) -> bool:
        """Read what has arrived of a stream. Returns whether more may come."""
        chunk = os.read(stream.fileno(), 65536)
        if stream is self.stderr:
            self.errors += chunk
            return bool(chunk) and self._has_room()
        (self.output if self.has_begun else self._before).extend(chunk)
        line = f"{LOGIN}\n".encode()
        if not self.has_begun and line in self._before:
            self._before, _, self.output = self._before.partition(line)
            self.has_begun = True
            self.deadline = time.monotonic() + self._work_s
            self._send()
        return bool(chunk) and self._has_room() and not self.has_answered

    def _has_room(self) -> bool:
        """Whether the output that has not been shown is short enough to go on."""
        if max(len(self.output), len(self.errors)) > OUTPUT_LIMIT:
            self.deadline = 0.0
        return self.deadline > 0.0

    @property
    def unshown(self) -> int:
        """The bytes of its output that have arrived since `lines` was called."""
        return len(self.output) + len(self.errors)

    def lines(self) -> Answer:
        """The whole lines that have arrived since the last call, or a part of a very long one."""
        parts = []
        for text in (self.output, self.errors):
            size = len(text) if len(text) > _MOST_UNSHOWN else text.rfind(b"\n") + 1
            parts.append(bytes(text[:size]))
            del text[:size]
        return self._answer(None, *parts)

    def answer(self) -> Answer:
        """The output that `lines` has not returned, and the exit code of the program."""
        exit_code = 0 if self.has_answered else None
        while exit_code is None and (exit_code := self.process.poll()) is None:
            self._read_errors()  # else a program that prints many would wait for ever
            if time.monotonic() >= self.deadline:
                break
            time.sleep(_POLL_S)
        self._read_errors()
        printed = bytes(self.output).removesuffix(_ANSWERED)
        return self._answer(exit_code, printed, bytes(self.errors))

    def _read_errors(self) -> None:
        # Do not wait for the end: a connection that ssh keeps (ControlPersist) may hold it open for long.
        with suppress(BlockingIOError):
            while self.read(self.stderr):
                pass

    def _answer(self, exit_code: int | None, *printed: bytes) -> Answer:
        texts = (*printed, bytes(self._before))
        output, errors, before = (text.decode(errors="replace") for text in texts)
        asked = (self.host, self._python, self._transport)
        return Answer(*asked, exit_code, output, errors, self.has_begun, before)

    def again(self, errors: str, config: str, direct: str) -> Login | None:
        """A second login, if this one was dropped before it began, and its deadline leaves time for one.

        With the configuration `direct`, ssh shares no connection to a jump host, and says why that one refuses.
        """
        has_time = time.monotonic() + 2 * jump.PAUSE_S < self.deadline
        if self.has_begun or not has_time or not jump.was_dropped(errors):
            return None
        self.close()
        way = direct if jump.NOT_SHARED in errors else config
        return Login(self.host, self._python, self._transport, way, pause_s=jump.PAUSE_S)

    def end_input(self) -> None:
        self._stdin.close()

    def close(self) -> None:
        self.end_input()
        self.stdout.close()
        ends_s = 0.0
        if is_this_host(self.host.name):  # a program ends if nobody reads its output any more
            ends_s = _END_S
        elif self.has_answered and not self._transport.is_ssh:
            # If a qrsh of a job is killed, Grid Engine kills the whole job.
            ends_s = max(_END_S, self.deadline - time.monotonic())
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ends_s)
        if not self._transport.is_ssh and self.process.poll() is None:
            self.process.terminate()  # srun then ends its step, which a killed one leaves behind
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDS_STEP_S)
        self.process.kill()
        self.process.wait()
        self.stderr.close()


class Logins(dict[str, Login]):
    """Logins that remain open for further programs, by the keys of their hosts."""

    have_claims = False  # whether they hold GPUs for the job, see `gpu_health.claim`

    def close(self) -> None:
        for login in self.values():  # so they end at the same time
            login.end_input()
        while self:
            self.popitem()[1].close()
