"""Run one program on many hosts at once over ssh, or another transport, and collect each host's output.

ssh never prompts the user. Its host key checks stay as the user configured them.
"""

from __future__ import annotations

import os
import selectors
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.transport import SSH, Transport

CONNECT_TIMEOUT_S = 5
ALIVE_INTERVAL_S = 15  # ssh ends after three of them without a sign of the host
NO_PROGRAM = 96  # not an exit code of ssh (255), a shell (126, 127, 128 + N) or Python (1, 2)

_LONGEST_WAIT_S = 3600.0  # epoll accepts no infinite time
_FILES_PER_HOST = 2  # stdout's pipe and stderr's file
_FILES_TO_START = 12  # while a process starts

# The command of the shell on each host. It is the same for every host and every user: the program's
# name comes through stdin, so that no shell interprets a part of a hostfile or of a path. mpirun's
# daemon starts in the same kind of shell: not a login shell, not interactive, no activated environment.
# The program starts in the root folder, because Python imports modules from its working folder.
_SHELL_LINE = (
    "IFS= read -r program; "
    f'command -v "$program" >/dev/null 2>&1 || exit {NO_PROGRAM}; cd / && exec "$program"'
)


@dataclass(frozen=True)
class Answer:
    """The output of a program on a host, and its exit code.

    `exit_code` is None if the program did not end in time, `NO_PROGRAM` if the host does not have the
    program, and 255 if ssh itself failed.
    """

    exit_code: int | None
    stdout: str
    stderr: str


def run_on_hosts(
    hosts: Sequence[Host],
    program: str,
    input: str,
    *,
    timeout_s: float,
    work_s: float = 0.0,
    transport: Transport = SSH,
    most_at_once: int | None = None,
) -> dict[Host, Answer]:
    """Run `program` on all hosts at the same time, each with `input` as its stdin.

    Where this process may not open enough files (`ulimit -n`), it runs on as many hosts at a time as it may.
    This machine runs it directly. A process that still runs at the deadline is killed on this side.

    Args:
        program: a path or a name, without arguments.
        timeout_s: the time for all hosts together, or for those on which it runs at a time.
        work_s: more time for each host from which something has arrived: the login is done.
        most_at_once: the number of hosts on which it runs at a time.

    Raises:
        UserError: `hosts` contains another host, and the transport is not installed here.
    """
    if not all(is_this_host(host.name) for host in hosts):
        transport.check_installed()
    stdin = f"{program}\n{input}".encode()
    answers: dict[Host, Answer] = {}
    limit = allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
    unused = limit - len(list(Path("/proc/self/fd").iterdir())) - _FILES_TO_START
    at_once = max(1, min(unused // _FILES_PER_HOST, most_at_once or len(hosts)))
    for first in range(0, len(hosts), at_once):
        running: list[_Running] = []
        deadline = time.monotonic() + timeout_s
        try:
            for host in hosts[first : first + at_once]:
                running.append(_Running(host, stdin, transport, deadline))
            _collect(running, work_s)
            answers |= {each.host: each.answer() for each in running}
        finally:
            for each in running:
                each.close()
    return answers


def shell_command(
    host: Host, line: str, transport: Transport = SSH, *, batch: bool = True
) -> list[str]:
    """The command that runs `line` in a Bourne shell on `host`. `line` must hold no input and no newline.

    Args:
        batch: ssh asks the user nothing.
    """
    if is_this_host(host.name):
        return ["sh", "-c", line]
    # A user's login shell may not be a Bourne shell: fish, or csh, whose quotes end with the line.
    line = f"exec sh -c {shlex.quote(line)}"
    if not transport.is_ssh:
        return [*transport.agent, host.name, line]
    options = ["-o", "BatchMode=yes"] if batch else []
    options += ["-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-T"]
    options += ["-o", f"ServerAliveInterval={ALIVE_INTERVAL_S}"]
    port = ["-p", str(host.port)] if host.port else []
    # "--" ends ssh's options. The hostfile's grammar already refuses names that begin with a dash.
    return ["ssh", *options, *port, "--", host.ssh_target, line]


class _Running:
    """The program on one host, with its output so far."""

    def __init__(self, host: Host, stdin: bytes, transport: Transport, deadline: float) -> None:
        self.host = host
        self.deadline = deadline
        self.stdout = b""
        # stdin is a file in memory: a user with many pipes gets pipes that are smaller than a program.
        # stderr is a file too: a connection that ssh keeps for later (ControlPersist) may hold it open
        # long after the program's end.
        self._stderr = os.memfd_create("mpiddp-stderr")
        with os.fdopen(os.memfd_create("mpiddp-stdin"), "w+b") as file:
            file.write(stdin)
            file.seek(0)
            self.process = subprocess.Popen(
                shell_command(host, _SHELL_LINE, transport),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
            )

    def answer(self) -> Answer:
        try:
            exit_code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            exit_code = None
        size = os.fstat(self._stderr).st_size
        stderr = os.pread(self._stderr, size, 0)
        return Answer(
            exit_code, self.stdout.decode(errors="replace"), stderr.decode(errors="replace")
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self._stderr)


def _collect(running: Sequence[_Running], work_s: float) -> None:
    """Read every program's stdout to its end, or until its deadline."""
    with selectors.DefaultSelector() as selector:
        for each in running:
            assert each.process.stdout is not None
            selector.register(each.process.stdout, selectors.EVENT_READ, each)
        while keys := list(selector.get_map().values()):
            now = time.monotonic()
            for key in keys:
                if key.data.deadline <= now:
                    selector.unregister(key.fileobj)
            first = min(key.data.deadline for key in keys)
            for key, _ in selector.select(min(max(0.0, first - now), _LONGEST_WAIT_S)):
                chunk = os.read(key.fd, 65536)
                if not key.data.stdout:
                    key.data.deadline += work_s
                key.data.stdout += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
