"""The process of a rank's program, and its streams.

The child leads a process group of its own: a signal to the rank's group reaches the agent alone, which
passes it on once. The agent adopts the orphans of its child, so it finds every process that the child has
started. If the agent itself is killed, the kernel kills the child.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from functools import cache, partial
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp import errors
from mpiddp.errors import DONE, MORE_PROCESSES, cause_of
from mpiddp.hosts import processes
from mpiddp.protocol.channel import STOP_SIGNALS, STREAMS, VALUE_LIMIT, Lines, is_shown
from mpiddp.protocol.variables import CONTAINER_BEGAN, ERROR_FILE, SAVE_GRACE_S
from mpiddp.runtime.helpers import Helpers
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.ending import Ending, ending_of_process
from mpiddp.runtime.program import COMMAND, command_environment, mpi_environment, script_environment
from mpiddp.runtime.rank import Rank
from mpiddp.runtime.streams import Input, Stream, is_readable
from mpiddp.text import escaped

if TYPE_CHECKING:
    from mpiddp.runtime.job.writes import WritesOfScript

# A user's signal.py in the working folder, which -c puts first, is not Python's own.
_START = "import sys; sys.path[:] = sys.path[sys.path[0] == '':]; from mpiddp.runtime.script import main; main()"
# The signals that a rank passes on to its script or its command.
PASSED = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
_INTERRUPTS = frozenset([*STOP_SIGNALS, signal.SIGQUIT])  # they wait for the end of a write
_STACK_S, _WRITTEN_S = 0.8, 0.05  # a script writes the first line of its stack, and then the others
REMOVES_S = 10.0  # for a runtime to end a container
_HELPERS_S = 0.5  # the processes of multiprocessing notice in this time that their parent has ended
_CLEAN_UP = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# The files of the first frames of a process, which lead to those of the script.
_BELOW_SCRIPT = ("<string>", str(Path(__file__).with_name("script.py")))


class Child:
    """The process of a rank's script, which waits for `go`, or of its command.

    All processes below the agent are the child's, but its `helpers`.
    """

    def __init__(self, rank: Rank, helpers: Helpers) -> None:
        self._rank, self._helpers = rank, helpers
        self.is_command = rank.command.kind == COMMAND
        world = rank.world
        name = f"rank {world.rank} on {world.hostname}"
        self.outputs = [
            Stream(number, name, rank.orders.terminal)
            for number in (STREAMS if rank.launcher else ())
        ]
        # stdin comes first: if a script asks for a password, the terminal stops showing the typed keys before
        # the question appears.
        inputs = [Input(rank.orders.terminal)] if rank.launcher and world.rank == 0 else []
        self.streams: list[Stream | Input] = [*inputs, *self.outputs]
        # The child's ends of the streams, by its file descriptors. They are closed here when it starts.
        self._files = {stream.number: stream.theirs for stream in self.streams}
        if rank.launcher and world.rank != 0:
            self._files[0] = os.open(os.devnull, os.O_RDONLY)
        self.pid = 0  # 0: it has not started
        self.status: int | None = None  # its exit code, or -N for signal N; None while it runs
        self.messages: dict[str, dict[str, Any]] = {}  # the latest of the script, by type
        self.news: list[dict[str, Any]] = []  # those on which the agent has not acted
        self.passed: set[int] = set()  # the signals that this agent has sent or has to send
        self.control: socket.socket | None = None  # to the script, which may close its end
        self.writes: WritesOfScript | None = None  # of a script that has imported torch
        self.waiting: dict[
            int, float
        ] = {}  # signals that wait for the end of a write, and since when
        self._lines = Lines(VALUE_LIMIT)  # a message has the variables that the script has set
        self._frames: list[str] = []
        # The kernel's kills for lack of memory in this control group, before the child could cause one.
        self._kills_before: processes.OomKills | None = None
        self.has_begun = False  # its Python has been told to run the script
        self._arguments = b""  # of its process, once it has begun
        self._remover: subprocess.Popen[bytes] | None = None  # of its container, if it has one

    @property
    def runs(self) -> bool:
        return self.pid > 0 and self.status is None

    def start(self, variables: Mapping[str, str]) -> None:
        program, files = self._rank.program, self._files
        self.forget_kills()
        ours, theirs = socket.socketpair()
        argv, passed = [program.name, *program.args], list[int]()
        launcher = self._rank.world.launcher.name
        if self.is_command:
            env = command_environment(variables, launcher, self._rank.kept)
        else:
            env = script_environment(variables, launcher, self._rank.kept)
            argv = [*self._rank.python, "-c", _START, str(theirs.fileno()), program.kind, *argv]
            passed = [theirs.fileno()]
            if "PMI_FD" in variables:  # MPICH's, for a script that uses MPI
                passed.append(int(variables["PMI_FD"]))
        try:
            argv, env = self._contained(argv, env)
            process = subprocess.Popen(
                argv,
                env=env,
                stdin=files.get(0),
                stdout=files.get(1),
                stderr=files.get(2),
                pass_fds=passed,
                preexec_fn=partial(_begin, os.getpid()),
            )
        except OSError as error:
            name = escaped(argv[0])
            fixes = {
                errno.ENOEXEC: "begin the script with a line such as #!/bin/sh",
                errno.ENOENT: f"correct its #! line, of which the program is missing; for a Windows line ending: "
                f"sed -i 's/\\r$//' {name}",
                errno.EAGAIN: MORE_PROCESSES,
            }
            sentence = f"{name} cannot be started: {error.strerror}."
            raise cause_of(error)(sentence, fix=fixes.get(error.errno or 0, "")) from None
        finally:
            for file in (*files.values(), theirs.detach()):
                os.close(file)
        process.returncode = 0  # this object does not wait for it, but `reap`
        self.pid, self.control = process.pid, ours
        _running[self.pid] = self
        for number in tuple(self.passed):  # signals that came before the command
            self.pass_on(number)

    def _contained(self, argv: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """The command in a container of the job's image, if it has one, with its variables."""
        orders = self._rank.orders
        if not orders.image:
            return argv, env
        from mpiddp.hosts.containers import Image, container_of  # most jobs have none

        image = Image.of(orders.image)
        name = f"mpiddp-{os.urandom(8).hex()}-{self._rank.world.rank}"
        mounts, error_file = orders.mounts, env[ERROR_FILE]
        if not re.search("[:,]", error_file):  # of a TMPDIR, which no option of a mount could name
            Path(error_file).touch(0o600)
            mounts = (*mounts, error_file)
        env = {**env, CONTAINER_BEGAN: str(time.time())}
        container, env = container_of(name, mounts, env, self._rank.kept)
        if (remover := image.remover(name, env)) is not None:
            self._remover = remover
            self._helpers.pids.add(remover.pid)
        return image.command(container, argv), env

    def tell(self, facts: Mapping[str, Any], within_s: float | None = None) -> bool:
        """Send the script a message. Returns whether it has taken it all within this time."""
        with contextlib.suppress(OSError):
            if self.control is not None:
                self.control.settimeout(within_s)
                try:
                    self.control.sendall(json.dumps(facts).encode() + b"\n")
                    return True
                finally:
                    self.control.settimeout(None)
        return False

    def keep_output(self, folder: Path) -> Path:
        """Write the outputs to files of this folder. Returns that of stderr, which will have a traceback."""
        stem = f"rank_{self._rank.world.rank:05d}"
        paths = {number: folder / f"{stem}.{name[3:]}" for number, name in STREAMS.items()}
        folder.mkdir(parents=True, exist_ok=True)
        for stream in self.outputs:
            stream.write_to(paths[stream.number])
        return paths[2]

    def connect(self, launcher: Server) -> None:
        shown, world = self._rank.orders.log_ranks, self._rank.world
        for stream in self.streams:
            if stream.number == 0 or is_shown(shown, world.rank, stream.number):
                stream.connect(launcher, world)

    def go(self, rank: Rank, variables: Mapping[str, str], store_port: int) -> None:
        """Let the script begin, with these variables, and torch's store at this port of MASTER_ADDR.

        If the process is of an earlier attempt, the last arguments of its program were not known then.
        """
        self.forget_kills()
        self.has_begun, self._arguments = True, processes.fact_of(self.pid, "cmdline")
        args = rank.program.args[len(self._rank.program.args) :]
        env, mpi = {**rank.orders.variables, **variables}, mpi_environment(rank.variables)
        is_shown = bool(self.outputs and self.outputs[-1].connection)
        facts = {"variables": env, "args": args, "mpi": mpi, "is_shown": is_shown}
        self.tell({"type": "go", "store_port": store_port, **facts})

    def hear(self) -> None:
        """Take the messages of the script."""
        while self.control is not None and is_readable(self.control):
            chunk, files = b"", list[int]()
            with contextlib.suppress(OSError):
                chunk, files, *_ = socket.recv_fds(
                    self.control, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC
                )
            for file in files:
                with errors.aid("wait for the script's writes", self.say):
                    from mpiddp.runtime.job.writes import WritesOfScript  # most commands have none

                    self.writes = WritesOfScript(file)
            if not chunk:  # it has ended, or has closed all files
                self.control.close()
                self.control = None
            try:
                lines = self._lines.split(chunk)
            except ValueError:  # no message: the script has written there itself
                self._lines, lines = Lines(VALUE_LIMIT), []
            for line in filter(None, lines):
                try:
                    facts = json.loads(line)
                    self.messages[facts["type"]] = facts
                    self.news.append(facts)
                except (ValueError, LookupError, TypeError):  # a stack, or a message cut by one
                    self._frames.append(line.decode(errors="replace"))

    def stack(self) -> str | None:
        """The main thread's stack as the traceback module prints it: "" of a command, None if none comes.

        The kernel interrupts a script, also while native code holds its interpreter. One that is stopped does
        not answer. Nothing tells where a stack ends.
        """
        if self.is_command or not self.pid:
            return ""
        if self.control is None:  # the script has closed the file that its stack goes to
            return None
        import linecache  # here, because it would cost each start a millisecond

        self._frames = []
        self.pass_on(signal.SIGURG)
        deadline = time.monotonic() + _STACK_S
        while self.control and not self._frames and time.monotonic() < deadline:
            if is_readable(self.control, _WRITTEN_S):
                time.sleep(_WRITTEN_S)
                self.hear()
        lines = [
            f'  File "{file}", line {number}, in {name}\n    {linecache.getline(file, int(number)).strip()}\n'
            for file, number, name in reversed(_FRAME.findall("\n".join(self._frames)))
            if file not in _BELOW_SCRIPT
        ]
        return f"thread MainThread:\n{''.join(lines)}" if lines else None

    def pass_on(self, number: int) -> None:
        """Send it a signal: to a script alone, whose workers it ends itself, but to all of a command.

        A Python that has not begun its script would print a traceback of mpiddp's at a SIGINT.
        """
        self.passed.add(number)
        if number == signal.SIGINT and not (self.has_begun or self.is_command):
            number = signal.SIGTERM
        # In a session without a terminal, the kernel ignores a SIGTSTP that no handler catches.
        if number == signal.SIGTSTP and not processes.catches(self.pid, number):
            number = signal.SIGSTOP
        if number in _INTERRUPTS and not self.is_command:
            self.waiting.setdefault(number, time.monotonic())
            self.pass_on_waiting()
        else:
            self._send(number)

    def pass_on_waiting(self) -> None:
        """Send the script the signals that have waited for the end of its writes, or long enough."""
        since = min(self.waiting.values(), default=None)
        if since is None or not (self.may_end() or time.monotonic() > since + SAVE_GRACE_S):
            return
        numbers, self.waiting = [*self.waiting], {}
        for number in numbers:
            self._send(number)
        if self.writes is not None:
            self.writes.go_on()

    def may_end(self) -> bool:
        """Whether a signal tears no file now. Then the script begins no other one for a moment."""
        return self.writes is None or not self.runs or self.writes.are_over()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.runs:
                (os.killpg if self.is_command else os.kill)(self.pid, number)

    def ending(self) -> Ending:
        assert self.status is not None
        status = self.status
        if status == -signal.SIGKILL and "over" in self.messages:
            status = int(self.messages["over"]["code"])  # it was about to end with this code
        recorded = Ending(*self.messages.get("failed", {"ending": [DONE]})["ending"])
        return ending_of_process(status, recorded, os.environ.get(ERROR_FILE, ""))

    @property
    def lack_of_memory(self) -> dict[str, int | None]:
        """The kernel's kills in the rank's control group since the child began, if there were any."""
        now, before = processes.kills_in(processes.group_of()), self._kills_before
        if now is None or before is None or now.kills <= before.kills:
            return {}
        return {"oom_kills": now.kills - before.kills, "memory_limit": now.limit_bytes}

    def _alive(self) -> dict[int, str]:
        """The processes below the agent that are the program's, with their names."""
        return processes.descendants(os.getpid(), but=self._helpers.pids)

    def name_what_is_left(self) -> None:
        """Say which processes outlive the program, once helpers have had time to end."""
        if not self.outputs:
            return
        deadline = time.monotonic() + _HELPERS_S
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(_WRITTEN_S)
        if left:
            commands = {pid: processes.command_of(pid) or name for pid, name in left.items()}
            # A fork has the arguments of its script's process, which name no script.
            forks = [pid for pid in left if processes.fact_of(pid, "cmdline") == self._arguments]
            commands |= dict.fromkeys(forks, "a fork of the script")
            names = [f"pid {pid} ({name})" for pid, name in commands.items()]
            self.say(f"ended what the script has left behind: {', '.join(names)}.")

    def say(self, sentence: str) -> None:
        """Add a line of mpiddp's own to stderr, if the launcher shows the streams."""
        if self.outputs:
            self.outputs[-1].say(sentence)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    @property
    def saves(self) -> bool:
        return self.says_it_saves or bool(self.writes and self.writes.now)

    @property
    def says_it_saves(self) -> bool:
        return bool(self.messages.get("saving", {}).get("active"))

    def close_idle_outputs(self) -> None:
        """Wait no longer for the end of a stream that a process outside of the program holds."""
        for stream in self.outputs:
            stream.close_if_idle()

    def discard(self) -> None:
        self.pass_on(signal.SIGKILL)
        self.close()

    def forget_kills(self) -> None:
        """Count the kernel's kills from now on: the program has not caused the earlier ones."""
        self._kills_before = processes.kills_in(processes.group_of())

    def end(self, grace_s: float) -> None:
        """End all processes that are left, see `end_all`. The output of one that cannot be killed is dropped.

        The processes that clean up after others come last: they remove shared memory, and end by themselves.
        """
        has_succeeded = self.status == DONE
        left = processes.end_all(lambda: [*filterfalse(_cleans_up, self._alive())], grace_s=grace_s)
        deadline = time.monotonic() + _HELPERS_S
        while self._alive() and not left and time.monotonic() < deadline:
            time.sleep(_WRITTEN_S)
        if left := left or processes.end_all(self._alive, grace_s=0.0):
            names = ", ".join(f"pid {pid} ({processes.command_of(pid)})" for pid in left)
            self.say(
                f"{names} cannot be killed: it waits in the kernel, so this host may need a restart."
            )
            for stream in self.outputs:
                stream.source.close()
        reap(self._helpers)
        if self._remover is not None and self._remover.returncode is None:
            if has_succeeded:  # and its container has ended with it
                self._remover.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it works on alone
                self._remover.communicate(b"\n", timeout=REMOVES_S)


def _cleans_up(pid: int) -> bool:
    """Whether this is a process of multiprocessing, or torch, that cleans up after those it serves."""
    return any(name in processes.fact_of(pid, "cmdline") for name in _CLEAN_UP)


_running: dict[int, Child] = {}  # by pid


def reap(helpers: Helpers) -> None:
    """Collect the children and the adopted orphans of this process that have ended."""
    pids = set[int]()
    with contextlib.suppress(ChildProcessError):
        for pid, status in iter(partial(os.waitpid, -1, os.WNOHANG), (0, 0)):
            pids.add(pid)
            if (child := _running.pop(pid, None)) is not None:
                child.status = os.waitstatus_to_exitcode(status)
    helpers.have_ended(pids)


def _begin(agent: int) -> None:
    """Prepare the forked process, before it becomes the program."""
    processes.signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    with contextlib.suppress(OSError):  # stdin is no terminal of this session
        if os.tcgetpgrp(0) == os.getpgrp():  # a Ctrl-C would reach the agent, not the program
            os.setpgid(0, 0)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpid())
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
            return
    # Linux shares its cores among sessions first. In one session, all ranks would get the share of one.
    os.setsid()


@cache
def caught_signals() -> int:
    """From the first call on, a file that gets the number of each signal that arrives.

    Before, a signal ends this process, and the script with it: MPI holds the interpreter's lock.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*PASSED, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    return reader
