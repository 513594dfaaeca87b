"""One connection to each jump host (ProxyJump), which all logins of this process and of mpirun share.

If more than ten logins have not ended, an sshd drops some of them (MaxStartups 10:30:100), and a jump host
would get one login for each host behind it. With one connection (ssh's ControlMaster) it gets one login. If
the user has such a connection open (ControlPath), that one is used.
"""

from __future__ import annotations

import atexit
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from subprocess import DEVNULL, PIPE
from typing import NamedTuple

from mpiddp.hosts.complaints import settings
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.private import own_folder
from mpiddp.hosts.processes import end_with_parent

PAUSE_S = 0.5  # before a login that was dropped is tried again
NOT_SHARED = "Stdio forwarding request failed"  # a shared connection tells no reason
_AT_ONCE = 8  # processes of ssh -G
_CHECK_S, _END_S = 0.05, 2.0
_DROPPED = re.compile(
    rf"(kex|ssh)_exchange_identification: .*|Connection (closed|reset) by .* port \d+|{NOT_SHARED}.*"
)


class _Connection(NamedTuple):
    process: subprocess.Popen[str]
    lines: str  # the lines of ssh's configuration by which logins share it

    @property
    def is_open(self) -> bool:
        return self.process.poll() is None


_connections: dict[str, _Connection] = {}  # by the value of ProxyJump
_lock = threading.Lock()


def was_dropped(errors: str) -> bool:
    """Whether an sshd has closed a login before it began, and ssh gives no other reason."""
    lines = [line for line in errors.splitlines() if not line.startswith("Warning: ")]
    return bool(lines) and all(map(_DROPPED.fullmatch, lines))


def share(hosts: Sequence[Host], config: str, login_s: float) -> None:
    """Connect to the last jump host on the way to each of these hosts, if that one accepts a connection.

    If the first and the last host need no jump host, none is looked for. `config`: ssh's file of options.
    """
    if not any(_jump_of(host) for host in (*hosts[:1], *hosts[-1:])):
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # ssh -G takes some milliseconds
        jumps = {*threads.map(_jump_of, hosts)} - {""}
    with _lock:
        are_open = {jump for jump, connection in _connections.items() if connection.is_open}
        for jump in jumps - are_open:
            if (connection := _connect(jump, config, login_s)) is not None:
                _connections[jump] = connection


def shared() -> str:
    """The lines of ssh's configuration by which logins share the connections."""
    return "".join(connection.lines for connection in _connections.values() if connection.is_open)


@cache
def _jump_of(host: Host) -> str:
    """The jump hosts on the way to this host, by ssh's own configuration; "" if there are none."""
    return [*settings(host, "proxyjump(?! none)"), ""][0]


def _connect(jump: str, config: str, login_s: float) -> _Connection | None:
    """Connect to the last host of `jump`. None if it refuses, or if the user has a connection there."""
    *before, last = jump.split(",")
    ssh = ["ssh", "-F", config, *(("-J", ",".join(before)) if before else ())]
    target = ("--", f"ssh://{last}")
    if _is_open([*ssh, "-O", "check", *target]):
        return None
    until, opened = time.monotonic() + login_s, ExitStack()
    # In /tmp, because a socket's path has at most 107 characters, and ssh needs some 60 of them.
    path = opened.enter_context(own_folder({})) / "%C"
    ssh.append(f"-oControlPath {path}")
    master = ("-N", "-oControlMaster yes", "-oControlPersist no", *target)
    while True:
        process = opened.enter_context(_running([*ssh, *master]))
        while process.poll() is None and time.monotonic() < until:
            if _is_open([*ssh, "-O", "check", *target]):
                assert process.stderr is not None
                process.stderr.close()  # a pipe that nobody reads would stop ssh once it is full
                atexit.register(opened.close)
                name = re.sub(r"^.*@|:\d+$", "", last).strip("[]")
                return _Connection(process, f"Host {name}\n  ControlPath {path}\n")
            time.sleep(_CHECK_S)
        errors = process.communicate()[1] if process.returncode is not None else ""
        if time.monotonic() + PAUSE_S > until or not was_dropped(errors):
            opened.close()
            return None
        time.sleep(PAUSE_S)


def _is_open(check: Sequence[str]) -> bool:
    """Whether ssh has a connection that logins can share."""
    return subprocess.run(check, stdin=DEVNULL, capture_output=True).returncode == 0


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of ssh, as long as the body lasts. It ends with this process."""
    process = subprocess.Popen(
        command,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGHUP),
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGHUP)  # then ssh removes its socket
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
