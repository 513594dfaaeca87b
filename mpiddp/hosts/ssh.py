"""Run one program on many hosts at once over ssh, and collect what each of them answers.

ssh asks the user for nothing, and its own checks stay as the user has set them.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.nodes import is_this_host
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open

CONNECT_TIMEOUT_S = 5
NO_PROGRAM = 96  # no exit code of ssh (255), of a shell (126, 127, 128 + N) or of Python (1, 2)

_FILES_PER_HOST = 2  # stdout's pipe and stderr's file

# What the shell on each host runs. This line is the same for every host and every user: the program
# comes through stdin, so a shell never reads a part of a hostfile or of a path. The shell is the same
# kind that starts mpirun's daemon: no login, no prompt, no activated environment. The program starts
# in the root folder, because Python imports what lies in its working folder.
_SHELL_LINE = (
    "IFS= read -r program; "
    f'command -v "$program" >/dev/null 2>&1 || exit {NO_PROGRAM}; cd / && exec "$program"'
)


@dataclass(frozen=True)
class Answer:
    """What a program on a host has written, and how it ended.

    `exit_code` is None where the program had not ended in time, `NO_PROGRAM` where the host has no
    such program, and 255 where ssh itself failed.
    """

    exit_code: int | None
    stdout: str
    stderr: str


def has_ssh() -> bool:
    """Whether ssh is installed here."""
    return shutil.which("ssh") is not None


def run_on_hosts(
    hosts: Sequence[Host], program: str, input: str, *, timeout_s: float
) -> dict[Host, Answer]:
    """Run `program` on all hosts at the same time, each with `input` as its stdin.

    This machine runs it without ssh. What still runs at the end is killed on this side.

    Args:
        program: a path or a name, without arguments.
        timeout_s: the time for all hosts together.

    Raises:
        UserError: another host is among `hosts`, and ssh is not installed here.
    """
    if not has_ssh() and not all(is_this_host(host.name) for host in hosts):
        raise UserError("ssh is not installed here. Run: sudo apt-get install openssh-client")
    allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
    deadline = time.monotonic() + timeout_s
    stdin = f"{program}\n{input}".encode()
    running: list[_Running] = []
    try:
        for host in hosts:
            running.append(_Running(host, stdin))
        _collect(running, deadline)
        return {each.host: each.answer(deadline) for each in running}
    finally:
        for each in running:
            each.close()


def _command(host: Host) -> list[str]:
    """What this machine starts to run `_SHELL_LINE` on `host`."""
    if is_this_host(host.name):
        return ["sh", "-c", _SHELL_LINE]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-T"]
    port = ["-p", str(host.port)] if host.port else []
    # Users may log in with another shell than a Bourne shell: csh, fish.
    line = f"exec sh -c {shlex.quote(_SHELL_LINE)}"
    # "--" ends ssh's options; the hostfile's grammar already lets no name begin with a dash.
    return ["ssh", *options, *port, "--", host.ssh_target, line]


class _Running:
    """The program on one host, with what it has written so far."""

    def __init__(self, host: Host, stdin: bytes) -> None:
        self.host = host
        self.stdout = b""
        # Files in memory, because a user with many pipes gets pipes that hold less than a program.
        # stderr is one as well: a connection that ssh keeps open for later (ControlPersist) may hold
        # it open long after the program's end.
        self._stderr = os.memfd_create("mpiddp-stderr")
        with os.fdopen(os.memfd_create("mpiddp-stdin"), "w+b") as file:
            file.write(stdin)
            file.seek(0)
            self.process = subprocess.Popen(
                _command(host), stdin=file, stdout=subprocess.PIPE, stderr=self._stderr
            )

    def answer(self, deadline: float) -> Answer:
        try:
            exit_code = self.process.wait(max(0.0, deadline - time.monotonic()))
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


def _collect(running: Sequence[_Running], deadline: float) -> None:
    """Read every program's stdout to its end, or until the deadline."""
    with selectors.DefaultSelector() as selector:
        for each in running:
            assert each.process.stdout is not None
            selector.register(each.process.stdout, selectors.EVENT_READ, each)
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                chunk = os.read(key.fd, 65536)
                key.data.stdout += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
