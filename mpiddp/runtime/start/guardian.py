"""The guardian of a rank's command: a small process between them, so that no process outlives the rank.

    rank ── signals ──► guardian ──► command, the leader of its own process group ──► its processes

The rank passes its signals on by sending them to the guardian, which sends them to the command's process
group. The guardian adopts the orphans of that group, so that it finds every process that the command has
started. It ends them when the command has ended, when the rank wants it, and when the rank is gone, even by
SIGKILL. If the guardian itself is killed, the kernel kills the command, and the rank ends the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mpiddp.hosts.processes import (
    KILL_S,
    adopt_orphans,
    descendants,
    end_all,
    signal_at_parents_end,
)
from mpiddp.runtime.job.stop import PASSED
from mpiddp.runtime.launcher.output_process import close_all_but

END_S = 3.0  # for the processes to end after SIGTERM; a client of Docker first ends its container
# systemd and batch systems signal every process of a job, also the command's own. The guardian gets such a
# signal too, and then passes on no equal one within this time, before or after.
# A request of the launcher may also be due to such a signal, and come from another host.
_WITNESS_S, _REQUEST_WITNESS_S, _EQUAL_S = 0.1, 0.5, 5.0
_SIGNAL_CHECK_S = 1.0  # a signal that arrives right before `select` does not interrupt it
_END_NOW = signal.SIGRTMIN  # from the rank: end everything


class Guardian:
    """The rank's side: it starts the command with this process's working folder, stdout and stderr.

    Signals to this process are the command's from now on. Create it in the main thread, and call `wait` next.

    Args:
        keeps_stdin: whether the command gets this process's stdin too, instead of an empty one.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, keeps_stdin: bool
    ) -> None:
        adopt_orphans()
        self.passed: set[int] = set()  # the signals that this process got for the command
        self._others = set(descendants(os.getpid()))  # of this rank, and not of its command
        self._reports, reports = os.pipe()
        rank = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
        # Before the command runs. A stop may be requested as soon as it does, and a signal to this process is
        # blocked in this thread alone.
        self._pid = 0
        self._early: list[int] = []  # the signals of that time
        handlers = {
            number: signal.signal(number, self._pass_on)
            for number in PASSED
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._pid = os.fork()
        if self._pid == 0:
            _guard(rank, reports, command, env, keeps_stdin=keeps_stdin)
        os.close(reports)
        if (error := self._report()) != 0:
            os.waitpid(self._pid, 0)
            for each, handler in handlers.items():
                signal.signal(each, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if error is None:
                raise OSError(0, "the process that guards it was killed")
            raise OSError(error, os.strerror(error))
        for early in self._early:
            self._send(early)
        # The kernel prefers the main thread, so a signal interrupts its `wait`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)

    def wait(self) -> int | None:
        """Pass signals on until the command has ended. All processes that it has started have ended then.

        Returns:
            Its exit code, -N if signal N has killed it; None if the guardian was killed.
        """
        while not select.select([self._reports], [], [], _SIGNAL_CHECK_S)[0]:
            pass
        code = self._report()
        if code is None:
            self.end()
        return code

    def end(self) -> None:
        """End the command and all that it has started, and return when they have ended. Any thread may."""
        self._send(_END_NOW)
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + END_S + KILL_S
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while not os.waitid(os.P_PID, self._pid, options) and time.monotonic() < deadline:
                time.sleep(0.02)
        # If the guardian was killed, this process has adopted what is left.
        others = {*self._others, self._pid}
        end_all(lambda: descendants(os.getpid(), but=others), grace_s=0.0)

    def request_stop(self) -> None:
        """Send the command SIGTERM, unless it has got one already. Any thread may."""
        timer = threading.Timer(_REQUEST_WITNESS_S, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        if signal.SIGTERM not in self.passed:
            self._pass_on(signal.SIGTERM, None)

    def _pass_on(self, number: int, _: object) -> None:
        self.passed.add(number)
        if self._pid:
            self._send(number)
        else:
            self._early.append(number)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _report(self) -> int | None:
        """The guardian's next report, None if it has ended. See `_guard`."""
        report = os.read(self._reports, _REPORT)
        return int(report) if report else None


_REPORT = 8  # bytes


def _guard(
    rank: int, reports: int, command: Sequence[str], env: Mapping[str, str], *, keeps_stdin: bool
) -> NoReturn:
    """Be the guardian of the process `rank`, in a process forked from it.

    It reports the error's number of the start, 0 for none, and then the end of the command. The signals that
    arrive here, and those that the command may get, are blocked.
    """
    try:
        # The MPI and the other ranks notice the end of a rank by the end of its connections.
        close_all_but({0, 1, 2, reports})
        os.setpgid(0, 0)  # a signal to the rank's process group is passed on, once
        adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, _END_NOW})
        signal_at_parents_end(_END_NOW)
        try:
            process = _start(command, env, keeps_stdin=keeps_stdin)
        except OSError as error:
            _write(reports, error.errno or 0)
            os._exit(1)
        _write(reports, 0)
        _pass_on_signals(rank, process)
        end_all(lambda: descendants(os.getpid()), grace_s=END_S)
        _reap(process)
        if process.returncode is not None:
            _write(reports, process.returncode)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _start(
    command: Sequence[str], env: Mapping[str, str], *, keeps_stdin: bool
) -> subprocess.Popen[bytes]:
    guardian, takes_terminal = os.getpid(), keeps_stdin and _is_in_foreground()

    def prepare() -> None:
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        os.setpgid(0, 0)
        if takes_terminal:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            os.tcsetpgrp(0, os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    stdin = None if keeps_stdin else subprocess.DEVNULL
    return subprocess.Popen(command, env=env, stdin=stdin, preexec_fn=prepare)


def _is_in_foreground() -> bool:
    """Whether stdin is a terminal whose Ctrl-C the rank gets: then the command has to get it instead."""
    try:
        return os.tcgetpgrp(0) == os.getpgid(os.getppid())
    except OSError:
        return False


def _pass_on_signals(rank: int, command: subprocess.Popen[bytes]) -> None:
    """Pass the rank's signals on until the command or the rank has ended, or the rank wants the end."""
    seen: dict[int, float] = {}  # when this process got a signal that the rank did not pass on
    due: dict[int, float] = {}  # when to pass a signal on
    while command.returncode is None and os.getppid() == rank:
        now = time.monotonic()
        timeout_s = min(due.values()) - now if due else _SIGNAL_CHECK_S
        info: Any = signal.sigtimedwait({*PASSED, signal.SIGCHLD, _END_NOW}, max(0.0, timeout_s))
        now = time.monotonic()
        if info is None or info.si_signo == signal.SIGCHLD:
            _reap(command)
        elif info.si_signo == _END_NOW:
            return
        elif info.si_pid == rank:
            due.setdefault(info.si_signo, now + _WITNESS_S)
        else:
            seen[info.si_signo] = now
        for number in [number for number, at in due.items() if at <= now]:
            del due[number]
            if now - seen.get(number, float("-inf")) >= _EQUAL_S:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, number)


def _reap(command: subprocess.Popen[bytes]) -> None:
    """Collect the command and the adopted orphans that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if pid == command.pid:
                command.returncode = os.waitstatus_to_exitcode(status)


def _write(reports: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the rank has ended
        os.write(reports, str(number).ljust(_REPORT).encode())
