"""One connection to each jump host (ProxyJump), which all logins of this process share, mpirun's as well.

An sshd drops some of more than ten logins that have not ended (MaxStartups 10:30:100), and a jump host gets
one for each host behind it, all at the same time. With one connection (ssh's ControlMaster) it gets one
login. The connection ends with this process. If the user has one open (ControlPath), that one is used.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from subprocess import DEVNULL, PIPE, STDOUT
from typing import NamedTuple

from mpiddp.hosts.complaints import settings
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.processes import signal_at_parents_end
from mpiddp.hosts.scratch import private_folder

PAUSE_S = 0.5  # before a login that was dropped is tried again
NOT_SHARED = "Stdio forwarding request failed"  # ssh says so, but not why the jump host refuses
_IS_OPEN = b"mpiddp-is-open\n"
_AT_ONCE = 8  # programs that tell of ssh's configuration
_END_S = 2.0
_DROPPED = re.compile(
    rf"(kex|ssh)_exchange_identification: .*|Connection (closed|reset) by .* port \d+|{NOT_SHARED}.*"
)


class _Connection(NamedTuple):
    process: subprocess.Popen[bytes]
    lines: str  # of ssh's configuration, by which logins share it

    @property
    def is_open(self) -> bool:
        return self.process.poll() is None


_connections: dict[str, _Connection] = {}  # by what ProxyJump says
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
        for jump in jumps - {
            jump for jump, connection in _connections.items() if connection.is_open
        }:
            if (connection := _connect(jump, config, login_s)) is not None:
                _connections[jump] = connection


def shared() -> str:
    """The lines of ssh's configuration by which logins share the connections."""
    return "".join(connection.lines for connection in _connections.values() if connection.is_open)


@cache
def _jump_of(host: Host) -> str:
    """What ssh's own configuration says of jump hosts on the way to this host, "" for none."""
    return [*settings(host, "proxyjump(?! none)"), ""][0]


def _connect(jump: str, config: str, login_s: float) -> _Connection | None:
    """Log in to the last host of `jump`. None if it refuses, or if the user has a connection there."""
    *before, last = jump.split(",")
    ssh = ["ssh", "-F", config, *(("-J", ",".join(before)) if before else ())]
    where = ("--", f"ssh://{last}")
    is_open = subprocess.run([*ssh, "-O", "check", *where], stdin=DEVNULL, capture_output=True)
    if is_open.returncode == 0:
        return None
    until, opened = time.monotonic() + login_s, ExitStack()
    # In /tmp, because a socket's path has at most 107 characters, and ssh needs some 60 of them.
    path = opened.enter_context(private_folder({})) / "%C"
    options = ["ControlMaster yes", f"ControlPath {path}", "ControlPersist no"]
    # ssh runs this command once others can share the connection.
    options += ["PermitLocalCommand yes", f"LocalCommand echo {_IS_OPEN.decode().strip()}"]
    command = [*ssh, "-N", *(f"-o{option}" for option in options), *where]
    while True:
        process = opened.enter_context(_running(command))
        printed = _printed(process, until)
        if printed.endswith(_IS_OPEN):
            atexit.register(opened.close)
            name = re.sub(r"^.*@|:\d+$", "", last).strip("[]")
            return _Connection(process, f"Host {name}\n  ControlPath {path}\n")
        if time.monotonic() + PAUSE_S > until or not was_dropped(printed.decode(errors="replace")):
            opened.close()
            return None
        time.sleep(PAUSE_S)


def _printed(process: subprocess.Popen[bytes], until: float) -> bytes:
    """What it prints until it has ended, or is open; or until that time."""
    assert process.stdout is not None
    printed, chunk, poll = b"", b"?", select.poll()
    with process.stdout as stdout:
        poll.register(stdout, select.POLLIN)
        while chunk and not printed.endswith(_IS_OPEN):
            if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                break
            chunk = os.read(stdout.fileno(), 65536)
            printed += chunk
    return printed


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """ssh, as long as the body lasts. It ends with this process."""

    def prepare() -> None:
        signal_at_parents_end(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
        # A batch system may send SIGTERM to every process of a job, whose ranks still save.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    process = subprocess.Popen(
        command,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
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
