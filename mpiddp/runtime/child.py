"""The process of a rank's script or command: start it, hear it, and end it with all that it has started.

The child leads a process group of its own: a signal to the rank's group reaches the agent alone, which
passes it on once. The agent adopts the orphans of its child, so it finds every process that the child has
started. If the agent itself is killed, the kernel kills the child.
"""

from __future__ import annotations

import contextlib
import errno
import json
import linecache
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.errors import STOPPED
from mpiddp.hosts.processes import (
    descendants,
    end_all,
    group_of,
    kills_in,
    signal_at_parents_end,
)
from mpiddp.paths import cause_of
from mpiddp.protocol.channel import Lines
from mpiddp.protocol.messages import LINE_LIMIT, recorded_error
from mpiddp.protocol.variables import ERROR_FILE
from mpiddp.runtime.job.ending import Ending, ending_of_process
from mpiddp.runtime.program import Program, command_environment
from mpiddp.text import escaped

_START = "from mpiddp.runtime.script import main; main(imports_torch=%s)"
# The signals that a rank passes on to its script or its command. SIGCONT follows SIGTSTP.
PASSED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
)
_STACK_S, _WRITTEN_S = 0.8, 0.05  # for a script to write its stack: the first line, and the others
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OF_OURS = ("<string>", str(Path(__file__).with_name("script.py")))  # they lead to the script


class Child:
    """The process of a rank's script, or of its command.

    `files` are open files of this process, by the child's file descriptor, and are closed here. `control` has
    both ends of the connection to a script, this process's first.

    Attributes:
        status: its exit code, -N for signal N; None as long as it runs.
        control: this process's end of the connection, until the script has closed it.
        said: what the script has said, by type. "error" says why it fails.
        others: processes of the agent that are none of this one's.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[int, int],
        control: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        self.is_command = control is None
        self.status: int | None = None
        self.control: socket.socket | None = None
        self.said: dict[str, dict[str, Any]] = {}
        self.others: set[int] = set()
        self._lines = Lines(LINE_LIMIT)
        self._frames: list[str] = []
        self._kills_before = kills_in(group_of())
        takes_terminal = 0 not in files and _is_in_foreground()
        begin = partial(_begin, os.getpid(), takes_terminal=takes_terminal)
        self._process = subprocess.Popen(
            argv,
            env=env,
            stdin=files.get(0),
            stdout=files.get(1),
            stderr=files.get(2),
            pass_fds=[control[1].fileno()] if control else (),
            preexec_fn=begin,
        )
        self.pid = self._process.pid
        for file in files.values():
            os.close(file)
        if control is not None:
            self.control = control[0]
            self.control.setblocking(False)
            control[1].close()

    @classmethod
    def of_script(cls, program: Program, files: Mapping[int, int]) -> Child:
        """A script, which waits for `go` once it has imported torch, if it may use it."""
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-c", _START % program.may_use_torch, str(theirs.fileno())]
        argv += [program.kind, program.name, *program.args]
        return cls(argv, os.environ, files, (ours, theirs))

    @classmethod
    def of_command(cls, program: Program, files: Mapping[int, int]) -> Child:
        """A command. Raises UserError or JobFailed if it cannot be started."""
        env = command_environment(os.environ)
        try:
            return cls([program.name, *program.args], env, files)
        except OSError as error:
            hint = " A script begins with a line such as #!/bin/sh."
            hint *= error.errno == errno.ENOEXEC
            sentence = f"{escaped(program.name)} cannot be started: {error.strerror}.{hint}"
            raise cause_of(error)(sentence) from None

    def go(self, env: Mapping[str, str], files: Mapping[str, int]) -> None:
        """Let the script begin: with these variables, and open files, which are closed here."""
        assert self.control is not None
        line = json.dumps({"env": env, "files": [*files]}).encode() + b"\n"
        self.control.setblocking(True)
        with contextlib.suppress(ConnectionError):  # the script has ended
            sent = socket.send_fds(self.control, [line], list(files.values()))
            self.control.sendall(line[sent:])
        self.control.setblocking(False)
        for file in files.values():
            os.close(file)

    def hear(self) -> bool:
        """Take what the script says next. False if it has said nothing, or has closed the connection."""
        if self.control is None:
            return False
        try:
            chunk = self.control.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:  # it has ended, or has closed all files
            self.control.close()
            self.control = None
        for line in self._lines.split(chunk):
            if line.startswith(b"{"):
                facts = json.loads(line)
                self.said[facts["type"]] = facts
            else:
                self._frames.append(line.decode(errors="replace"))
        return bool(chunk)

    def stack(self) -> str | None:
        """The main thread's stack as the traceback module prints it: "" of a command, None if none comes.

        The kernel interrupts a script, also while native code holds its interpreter. One that is stopped does
        not answer. Nothing tells where a stack ends.
        """
        if self.is_command:
            return ""
        self._frames = []
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGURG)
        deadline = time.monotonic() + _STACK_S
        while self.control and not self._frames and time.monotonic() < deadline:
            if select.select([self.control], [], [], _WRITTEN_S)[0]:
                time.sleep(_WRITTEN_S)
                self.hear()
        lines = [
            f'  File "{file}", line {number}, in {name}\n    {linecache.getline(file, int(number)).strip()}\n'
            for file, number, name in reversed(_FRAME.findall("\n".join(self._frames)))
            if file not in _OF_OURS
        ]
        return f"thread MainThread:\n{''.join(lines)}" if lines else None

    def pass_on(self, number: int) -> None:
        """Send it a signal: to a script alone, whose workers it ends itself, but to all of a command."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_command:
                os.killpg(self.pid, number)
            elif self.status is None:
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Collect the child and the adopted orphans that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid == self.pid:
                    self.status = self._process.returncode = os.waitstatus_to_exitcode(status)

    def ending(self, *, is_stopping: bool) -> Ending:
        """What wait() says, with the script's own reason. `is_stopping`: a launcher has requested a stop."""
        assert self.status is not None
        ending = ending_of_process(self.status)
        has_stopped = ending.code == STOPPED and ("stopped" in self.said or is_stopping)
        if has_stopped or not ending.is_failure:
            return ending
        # A script that has failed may be ended before it has printed all.
        reason = self.said.get("error", {})
        if reason and (reason["code"] == ending.code or ending.signal == signal.SIGTERM):
            error, traceback = reason["error"], reason["traceback"]
            return Ending(reason["code"], error, traceback, reason["is_verdict"])
        return ending._replace(sentence=recorded_error(os.environ.get(ERROR_FILE, "")))

    @property
    def lack_of_memory(self) -> dict[str, int | None]:
        """The kernel's kills in the rank's control group since the child began, if there were any."""
        now, before = kills_in(group_of()), self._kills_before
        if now is None or before is None or now.count <= before.count:
            return {}
        return {"oom_kills": now.count - before.count, "memory_limit": now.limit_bytes}

    @property
    def left(self) -> dict[int, str]:
        """The child and all that it has started, as far as they still run."""
        return descendants(os.getpid(), but=self.others)

    def end(self, grace_s: float) -> None:
        """End all that is left: by SIGTERM, if there is time for it, and by SIGKILL after `grace_s`."""
        end_all(lambda: self.left, grace_s=grace_s)
        self.reap()


def _begin(agent: int, *, takes_terminal: bool) -> None:
    """In the forked process, before it becomes the program."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    os.setpgid(0, 0)
    if takes_terminal:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)


def _is_in_foreground() -> bool:
    """Whether stdin is a terminal whose Ctrl-C this process gets: then the child has to get it instead."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def end_by(number: int) -> None:
    """End this process as its child has ended, so that the MPI sees the signal too."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
