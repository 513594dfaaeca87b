"""One connection to each jump host (ProxyJump), which all logins of this process share, mpirun's as well.

An sshd drops some of more than ten logins that have not ended (MaxStartups 10:30:100), and a jump host gets
one for each host behind it, all at the same time. With one connection (ssh's ControlMaster) it gets one
login. The connection ends with this process. If the user has one open (ControlPath), that one is used.
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
from functools import cache
from subprocess import DEVNULL, PIPE
from typing import NamedTuple

from mpiddp.hosts.complaints import settings
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.processes import signal_at_parents_end
from mpiddp.hosts.scratch import private_folder

PAUSE_S = 0.5  # before a login that was dropped is tried again
NOT_SHARED = "Stdio forwarding request failed"  # ssh says so, but not why the jump host refuses
_AT_ONCE = 8  # programs that tell of ssh's configuration
_CHECK_S, _END_S = 0.05, 2.0
_DROPPED = re.compile(
    rf"(kex|ssh)_exchange_identification: .*|Connection (closed|reset) by .* port \d+|{NOT_SHARED}.*"
)


class _Connection(NamedTuple):
    process: subprocess.Popen[str]
    lines: str  # of ssh's configuration, by which logins share it

    @property
    def is_open(self) -> bool:
        return self.process.poll() is None


_connections: dict[str, _Connection] = {}  # by the value of ProxyJump
_lock = threading.Lock()


def was_dropped(errors: str) -> bool:
    """Whether a login was closed before it began, for no other reason than that its sshd has too many."""
    lines = [line for line in errors.splitlines() if not line.startswith("Warning: ")]
    return bool(lines) and all(map(_DROPPED.fullmatch, lines))


def share(hosts: Sequence[Host], config: str, login_s: float) -> None:
    """Connect to the last jump host on the way to each of these hosts, if it accepts that.

    If there is none on the way to the first and the last host, none is looked for. `config` is the path of
    ssh's configuration.
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
    """The jump hosts on the way to this host, by ssh's own configuration; "" for none."""
    return [*settings(host, "proxyjump(?! none)"), ""][0]


def _connect(jump: str, config: str, login_s: float) -> _Connection | None:
    """Log in to the last host of `jump`. None if it refuses, or if the user has a connection there."""
    *before, last = jump.split(",")
    ssh = ["ssh", "-F", config, *(("-J", ",".join(before)) if before else ())]
    target = ("--", f"ssh://{last}")
    if _is_open([*ssh, "-O", "check", *target]):
        return None
    until, opened = time.monotonic() + login_s, ExitStack()
    # In /tmp, because a socket's path has at most 107 characters, and ssh needs some 60 of them.
    path = opened.enter_context(private_folder({})) / "%C"
    ssh.append(f"-oControlPath {path}")
    master = ("-N", "-oControlMaster yes", "-oControlPersist no", *target)
    while True:
        process = opened.enter_context(_running([*ssh, *master]))
        while process.poll() is None and time.monotonic() < until:
            if _is_open([*ssh, "-O", "check", *target]):
                assert process.stderr is not None
                process.stderr.close()  # nobody reads it any more, and a full pipe would stop ssh
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
    """Whether there is a connection that others can share, by ssh's own command."""
    return subprocess.run(check, stdin=DEVNULL, capture_output=True).returncode == 0


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """ssh, as long as the body lasts. It ends with this process."""

    def prepare() -> None:
        signal_at_parents_end(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
        # A batch system may send SIGTERM to every process of a job, whose ranks still save.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    process = subprocess.Popen(
        command,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=prepare,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGHUP)  # it removes its socket
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
