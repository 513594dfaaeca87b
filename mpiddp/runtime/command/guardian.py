"""The guardian of a rank's command: a small process between them, so that no process outlives the rank.

    rank ◄── socket ──► guardian ──► command, the leader of its own process group ──► its processes

The guardian starts the command and passes the rank's signals on to the command's process group. It adopts
the orphans of that group, so that it finds every process that the command has started. It ends them when
the command has ended, when the rank wants it, and when the rank is gone, even by SIGKILL. If the guardian
itself is killed, the kernel kills the command, and the rank ends the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mpiddp.hosts.pidfd import has
from mpiddp.hosts.processes import (
    adopt_orphans,
    descendants,
    signal_all,
    signal_at_parents_end,
)

# The signals that a rank passes on. SIGCONT follows SIGTSTP.
PASSED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
MARK = (
    f"{AGENT_STORE}=True".encode()
)  # the command has this variable, and no other child of the rank
END_S = 3.0  # for the processes to end after SIGTERM; a client of Docker first ends its container
_KILL_S = 5.0  # for killed processes to end, unless a disk or a driver blocks them
_PAUSE_S = 0.02
# systemd and batch systems signal every process of a job, also the command's own. The guardian gets such a
# signal too, and then passes on no equal one within this time, before or after.
# A request of the launcher may also be due to such a signal, and come from another host.
_WITNESS_S, _REQUEST_WITNESS_S, _EQUAL_S = 0.1, 0.5, 5.0
_CHUNK = 65536


class SignalWakeup:
    """Within the body, signals that were not ignored arrive on a socket, each as a byte with its number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}

    def __enter__(self) -> socket.socket:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self.receiver

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        self.receiver.close()
        self._sender.close()


class Guardian:
    """The rank's side. Create it before the process has threads: it forks."""

    def __init__(self) -> None:
        rank = os.getpid()
        adopt_orphans()
        self._connection, other = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _guard(other, rank)
        other.close()
        self._buffer = b""
        self._signals = SignalWakeup(PASSED)
        self.passed: set[int] = set()  # the signals that this process got for the command

    def start(self, command: Sequence[str], env: Mapping[str, str], *, keeps_stdin: bool) -> None:
        """Start the command with this process's working folder, stdout and stderr. Call `wait` next.

        Signals to this process are the command's from now on.

        Args:
            keeps_stdin: whether it gets this process's stdin too, instead of an empty one.

        Raises:
            OSError: it cannot be started.
        """
        files = [0 if keeps_stdin and _is_open(0) else -1, 1, 2]
        message = {
            "command": list(command),
            "env": dict(env),
            "has_stdin": files[0] == 0,
            "takes_terminal": files[0] == 0 and _owns_terminal(),
        }
        self._signals.__enter__()
        with _opened_null() as null:
            open_files = [file if file >= 0 and _is_open(file) else null for file in files]
            first, *rest = _chunks(json.dumps(message).encode() + b"\n")
            socket.send_fds(self._connection, [first], open_files)
            for chunk in rest:
                self._connection.sendall(chunk)
        answer = self._receive()
        if answer is None:
            answer = {"error": [0, "the process that guards it was killed"]}
        if "error" in answer:
            self._signals.close()
            raise OSError(*answer["error"])

    def wait(self) -> int | None:
        """Pass signals on until the command has ended. All processes that it has started have ended then.

        Returns:
            Its exit code, -N if signal N has killed it; None if the guardian was killed.
        """
        arrivals = self._signals.receiver
        with contextlib.closing(self._signals), selectors.DefaultSelector() as selector:
            selector.register(arrivals, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is arrivals:
                        for number in arrivals.recv(_CHUNK):
                            self.passed.add(number)
                            self._send(signal=number)
                    elif (answer := self._receive()) is None:
                        self.end()
                        return None
                    else:
                        return int(answer["ended"])

    def end(self) -> None:
        """End the command and all that it has started, and return when they have ended. Any thread may."""
        self._send(end=True)
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + END_S + _KILL_S
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while not os.waitid(os.P_PID, self._pid, options) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
        # If the guardian was killed, this process has adopted what is left.
        _end_all(self._left, grace_s=0.0)

    def _left(self) -> list[int]:
        left = []
        for pid in descendants(os.getpid(), but=[self._pid]):
            with contextlib.suppress(OSError):
                left += [pid] if has(pid, MARK) else []
        return left

    def request_stop(self) -> None:
        """Send the command SIGTERM, unless it has got one already. Any thread may."""
        self.passed.add(signal.SIGTERM)
        self._send(stop=True)

    def _send(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # the guardian has ended
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any] | None:
        """The guardian's next message, None if it has ended."""
        while b"\n" not in self._buffer:
            try:
                chunk = self._connection.recv(_CHUNK)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _owns_terminal() -> bool:
    """Whether stdin is a terminal whose Ctrl-C this process gets: then the command has to get it instead."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _opened_null() -> Iterator[int]:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        yield null
    finally:
        os.close(null)


def _chunks(data: bytes) -> list[bytes]:
    return [data[first : first + _CHUNK] for first in range(0, len(data), _CHUNK)]


def _end_all(find: Callable[[], Collection[int]], *, grace_s: float) -> None:
    """End the processes that `find` returns: SIGTERM, and SIGKILL after `grace_s`."""
    if not find():
        return
    if grace_s:
        signal_all(find, signal.SIGTERM)
        signal_all(find, signal.SIGCONT)
    deadline = time.monotonic() + grace_s
    while find() and time.monotonic() < deadline + _KILL_S:
        if time.monotonic() >= deadline:
            signal_all(find, signal.SIGKILL)
        time.sleep(_PAUSE_S)


# --- in the guardian's process ---


def _guard(connection: socket.socket, rank: int) -> NoReturn:
    try:
        _GuardianProcess(connection, rank).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


class _GuardianProcess:
    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._buffer = b""
        self._files: list[int] = []
        self._command: subprocess.Popen[bytes] | None = None
        self._seen: dict[
            int, float
        ] = {}  # when this process got a signal that the rank did not pass on
        self._due: dict[int, float] = {}  # when to pass a signal on
        self._passed: set[int] = set()
        self._is_over = False

    def run(self) -> None:
        os.setpgid(0, 0)  # a signal to the rank's process group is passed on, once
        adopt_orphans()
        numbers = [number for number in PASSED if number != signal.SIGTSTP]
        with (
            SignalWakeup([*numbers, signal.SIGCHLD]) as arrivals,
            selectors.DefaultSelector() as selector,
        ):
            # The end of the connection is not enough: a process that the rank forks may hold it open.
            signal_at_parents_end(signal.SIGTERM)
            selector.register(arrivals, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            while not self._is_over and os.getppid() == self._rank:
                for key, _ in selector.select(self._timeout()):
                    if key.fileobj is arrivals:
                        for number in arrivals.recv(_CHUNK):
                            self._on_signal(number)
                    else:
                        self._receive()
                self._pass_on()
            _end_all(lambda: descendants(os.getpid()), grace_s=END_S)
            self._reap()
            if self._command is not None and self._command.returncode is not None:
                self._answer(ended=self._command.returncode)

    def _timeout(self) -> float | None:
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
            if self._command is not None and self._command.returncode is not None:
                self._is_over = True
        else:
            self._seen[number] = time.monotonic()

    def _reap(self) -> None:
        """Collect the command and the adopted orphans that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if self._command is not None and pid == self._command.pid:
                    self._command.returncode = os.waitstatus_to_exitcode(status)

    def _receive(self) -> None:
        try:
            chunk, files, _, _ = socket.recv_fds(self._connection, _CHUNK, 3)
        except ConnectionError:
            chunk, files = b"", []
        self._files += files
        self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "command" in message:
                self._start(message)
            elif "signal" in message:
                self._due.setdefault(message["signal"], time.monotonic() + _WITNESS_S)
            elif "stop" in message:
                if signal.SIGTERM not in self._passed | self._seen.keys():
                    self._due.setdefault(signal.SIGTERM, time.monotonic() + _REQUEST_WITNESS_S)
            else:
                self._is_over = True
        if not chunk:
            self._is_over = True

    def _start(self, message: dict[str, Any]) -> None:
        guardian = os.getpid()
        stdin, stdout, stderr = self._files

        def prepare() -> None:
            signal_at_parents_end(signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(1)
            os.setpgid(0, 0)
            if message["takes_terminal"]:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
                os.tcsetpgrp(stdin, os.getpid())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*PASSED, signal.SIGTTOU})

        try:
            self._command = subprocess.Popen(
                message["command"],
                env=message["env"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=prepare,
            )
        except OSError as error:
            self._answer(error=[error.errno, error.strerror])
            self._is_over = True
        else:
            self._answer(started=True)
        for file in self._files:
            os.close(file)

    def _pass_on(self) -> None:
        """Pass the signals on that are due, unless the whole job has got them from somebody else."""
        now = time.monotonic()
        for number in [number for number, at in self._due.items() if at <= now]:
            del self._due[number]
            is_repeated = now - self._seen.get(number, float("-inf")) < _EQUAL_S
            self._passed.add(number)
            if self._command is not None and not is_repeated:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._command.pid, number)

    def _answer(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # the rank has ended
            self._connection.sendall(json.dumps(message).encode() + b"\n")
