"""One rank from its start to its end: `mpiddp run` is what mpirun starts, and the script is its child.

    mpirun … python -m mpiddp run train.py --lr 0.1
    mpirun … python -m mpiddp run -- ./any_command

The agent is the standard library, never torch. It starts the script's Python at once, which imports torch
while the agent meets the others: over the launcher's channel, under a raw mpirun over MPI. A command starts
once the ranks have met. Then the agent waits in one loop for the output, the launcher, signals and the end of
the child, which it sees by wait(). It alone says how the child ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import FAILED, STOPPED, JobFailed, UserError, named_by, print_error
from mpiddp.hosts import private
from mpiddp.hosts.processes import adopt_orphans, signal_at_parents_end, usage_of
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open, reserve
from mpiddp.protocol import variables
from mpiddp.protocol.channel import OUTPUT_PROCESS, STREAMS, TEXT_LIMIT, is_shown
from mpiddp.protocol.channel import SCRIPT as CHANNEL_SCRIPT
from mpiddp.protocol.terminal import Terminal, give_size, prefix_of
from mpiddp.runtime.child import MODULE, PASSED, SCRIPT, Child, Program, parse
from mpiddp.runtime.gpu import limit_threads, prepare
from mpiddp.runtime.job.coordinator import GRACE_S, Coordinator, Server
from mpiddp.runtime.job.ending import Ending, Refused, ending_of
from mpiddp.runtime.output import Input, Stream
from mpiddp.world import World, is_joined

_SOCKETS_PER_RANK = 3  # of torch's store: that of `process_group`, a script's own, and one to spare
_END_S = 3.0  # for the processes to end after SIGTERM; a client of Docker first ends its container
_WAIT_MS, _WAIT_IN_GRACE_MS = 1000, 50  # for what may happen next
_REQUESTS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)


def main(argv: list[str]) -> int:
    """Run `mpiddp run ARGV`: be a rank of a job, and return the exit code of its program."""
    program = parse(argv)
    if is_joined(os.environ):  # a rank's command, or a process that it has started
        python = {SCRIPT: [sys.executable], MODULE: [sys.executable, "-m"]}
        argv = [*python.get(program.kind, []), program.name, *program.args]
        program.check()
        os.execvp(argv[0], argv)
    # Not by os._exit: MPICH tells its mpirun in a handler of atexit that a rank has finalized MPI.
    return Agent(program, World.from_env()).run()


class Agent:
    """One rank."""

    def __init__(self, program: Program, world: World) -> None:
        self.world, self.child = world, Child(program)
        self.name = f"rank {world.rank} on {world.hostname}"
        if kept := os.environ.pop(variables.PRIVATE, ""):
            with named_by(""):
                given = private.take(kept)
            host, *names = given.pop(variables.LEFT_OUT).split(",")
            for each in (
                names if host == world.hostname else ()
            ):  # it has them from the launcher's shell
                os.environ.pop(each, None)
            os.environ.update(given)
        self._kept = kept
        address, key = os.environ.pop(variables.ADDRESS, ""), os.environ.pop(variables.SECRET, "")
        self._launcher = Server(address, key) if address and key else None
        self._selection = os.environ.pop(variables.OUTPUT, "") if self._launcher else ""
        if self._launcher is None:
            os.environ.pop(variables.JOB, None)
        self.coordinator = Coordinator(world, None)  # until it is connected
        terminal = Terminal.parse(os.environ.pop(variables.TERMINAL, ""))
        self._prefix = prefix_of(world.rank, world.hostname) if terminal.has_prefix else ""
        self._terminal = terminal.behind(self._prefix)
        self._input: Input | None = None  # of rank 0
        streams = STREAMS if self._selection else ()
        self._streams = [Stream(each, self.name, self._terminal) for each in streams]
        # Those of the child, by its file descriptors. Without a launcher, it has those of the MPI.
        self._files = {stream.number: stream.theirs for stream in self._streams}
        # For torch's `@record`. No other user of the host can guess the name, and so create the file before.
        name = f"mpiddp-{os.urandom(16).hex()}-{world.rank}-error.json"
        self._error_file = Path(os.environ.get("TMPDIR") or "/tmp", name)
        # This process's parent. Without it, nothing would end this rank.
        has_daemon = world.launcher.mpis or world.launcher.name == "slurm"
        self._daemon = os.getppid() if has_daemon else None
        self._stop_signal = 0  # with which the launcher has requested a stop
        self._ends_on_request = False
        self._wakeup: int | None = None  # readable when a signal has arrived
        self._code: int | None = None  # with which this rank ends because of another
        self._ends_at: float | None = None  # when another rank's failure ends this one

    def run(self) -> int:
        try:
            self._begin()
            ending = self._serve()
        except BaseException as error:
            ending = ending_of(error)
            if self._launcher is not None or not isinstance(error, Refused):
                self._report(ending)
            ranks = self.coordinator
            if isinstance(error, JobFailed | UserError) and (ranks.has_launcher or ranks.hostnames):
                return ending.code  # it has been reported
            raise
        finally:
            if self.child.runs:  # this rank could not begin
                self.child.end(0.0)
            self._error_file.unlink(missing_ok=True)
        if self._code is not None:
            return self._code
        if self._ends_on_request or not ending.is_failure:
            # The first rank that exits with a code other than 0 ends the others, which may still save.
            self.coordinator.leave(waits=self._ends_on_request)
        return ending.code

    def _begin(self) -> None:
        """Start the script, and meet the other ranks meanwhile."""
        if self._daemon is not None:
            signal_at_parents_end(signal.SIGTERM)
        # Whoever ignores it has no children to wait for, and a parent's choice is inherited.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A SIGKILL of the launcher leaves the last output to this process.
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(OUTPUT_PROCESS, encoding="utf-8")
        child, world, launcher = self.child, self.world, self._launcher
        allow_open(_SOCKETS_PER_RANK * world.world_size + OPEN_BESIDES)
        if launcher is None:
            give_size(1)
        elif world.rank == 0:
            self._input = Input(launcher, world, self._terminal)
            self._files[0] = self._input.theirs
        else:
            self._files[0] = os.open(os.devnull, os.O_RDONLY)
        problem: UserError | JobFailed | None = None
        try:
            prepare(world)
            child.program.check()
            if not child.is_command:
                child.start(self._files)
        except (UserError, JobFailed) as error:
            problem = error
        if launcher is not None:
            self._connect(launcher)
        if isinstance(problem, JobFailed):  # else all ranks refuse it
            raise problem
        # From here on, the script's Python starts beside this process: what it needs no earlier loads now.
        from mpiddp.runtime.rendezvous.meet import joining_timeout_s, meet
        from mpiddp.runtime.rendezvous.result import RankInfo

        files = [] if world.local_world_size == world.world_size else child.program.files
        info = RankInfo.of_this_process(world, str(problem or ""), files)
        try:
            self.coordinator, env, store = meet(self.coordinator, info)
        finally:
            if self._kept:  # all ranks have taken it
                private.remove(self._kept)
        # Not before: the process beside rank 0 that serves the channel, where no launcher does, is no orphan
        # of the script's.
        adopt_orphans()
        self._catch_signals()
        ranks = self.coordinator
        if ranks.connection is not None:
            key = ranks.server.member_key(world.rank, CHANNEL_SCRIPT)
            env |= {variables.CHANNEL: ranks.server.address, variables.CHANNEL_SECRET: key}
        if world.launcher.name != "torchrun":
            env[variables.ERROR_FILE] = str(self._error_file)
        if threads := limit_threads(ranks.world):  # only now known
            env["OMP_NUM_THREADS"] = str(threads)
        os.environ.update(env)
        self._join(joining_timeout_s())
        if store is not None and not child.said.get("ready", {}).get("has_torch"):
            reserve(store)  # a process of the program may listen there
            store = None
        if child.is_command:
            with ranks.all_or_none():
                child.start(self._files)
        else:
            child.go(env, store)

    def _connect(self, launcher: Server) -> None:
        """Connect to the launcher: the messages, and the streams that it shows."""
        world = self.world
        self.coordinator = Coordinator(world, launcher)
        self.coordinator.has_launcher = True
        self.coordinator.on_news = self._obey
        self.coordinator.send("started", host=world.hostname, pid=os.getpid())
        for stream in self._streams:
            if is_shown(self._selection, world.rank, stream.number):
                stream.connect(launcher, world)
        if folder := os.environ.get(variables.LOG_DIR):
            self._log_to(Path(folder).absolute(), "--log-dir")

    def _log_to(self, folder: Path, option: str = "") -> None:
        """Write the streams to files of this folder. That of stderr will contain a traceback."""
        stem = f"rank_{self.world.rank:05d}"
        paths = {number: folder / f"{stem}.{name[3:]}" for number, name in STREAMS.items()}
        with named_by(option):
            folder.mkdir(parents=True, exist_ok=True)
            for stream in self._streams:
                stream.write_to(paths[stream.number])
        self.coordinator.send("log", path=str(paths[2]))

    def _join(self, timeout_s: float) -> None:
        """Wait until the scripts of all ranks have imported torch, unless that of this one has ended."""
        child, ranks = self.child, self.coordinator
        while child.runs and "ready" not in child.said:
            self._wait()
        if child.status is not None:
            return
        ranks.send("joining", timeout_s=timeout_s)
        ranks.give("joined", None, timeout_s=None if ranks.has_launcher else timeout_s, calls=False)
        while ranks.connection and child.status is None and not ranks.given("joined", timeout_s):
            self._wait()

    def _serve(self) -> Ending:
        """Wait for all that may happen until the script has ended. End what it has left."""
        child = self.child
        while child.status is None:
            self._wait()
        ending = child.ending()
        is_success = not (ending.is_failure or self._stop_signal or self._code)
        left = child.left_behind() if is_success and self._streams else {}
        if left:
            named = ", ".join(f"pid {pid} ({command})" for pid, command in left.items())
            self._streams[-1].say(f"ended what the script has left behind: {named}.")
        self._report(ending)
        if child.end(_END_S):  # what is left cannot be killed
            for stream in self._streams:
                stream.source.close()
        while not all(stream.is_done for stream in self._streams):
            self._wait()
        return ending

    def _catch_signals(self) -> None:
        """From now on, a file is readable when a signal has arrived, and contains its number.

        Before, a signal ends this process, and the script with it: MPI holds the interpreter's lock.
        """
        self._wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*PASSED, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def _wait(self) -> None:
        """Act on what happens next."""
        child, channel = self.child, self.coordinator
        connection = None if channel.is_lost else channel.connection
        poll = select.poll()
        for stream in self._streams:
            stream.register(poll)
        if self._input is not None:
            self._input.register(poll)
        for file in (child.control, self._wakeup, connection):
            if file is not None:
                poll.register(file, select.POLLIN)
        ready = dict(poll.poll(_WAIT_IN_GRACE_MS if self._ends_at else _WAIT_MS))
        for stream in self._streams:
            stream.act(ready)
        if self._input is not None and (manners := self._input.act(ready)):
            channel.send("terminal", **manners._asdict())
        child.reap()  # then, what an ended script has said last is there
        child.hear()
        if log := child.said.pop("log_to", None):
            self._log_to(Path(log["folder"]))
        if connection is not None and connection.fileno() in ready:
            channel.receive()
        self._see_failure()
        if self._wakeup is not None and self._wakeup in ready:
            for number in os.read(self._wakeup, 4096):
                if number != signal.SIGCHLD:
                    child.pass_on(number)

    def _obey(self, facts: Mapping[str, Any]) -> None:
        """Act on a message of the launcher."""
        match facts:
            case {"type": "end", "code": int(code)}:
                self._end(code)
            case {"type": "stop" | "stopping" as kind, "signal": int(number)}:
                # "stopping": the script talks to the launcher itself.
                if kind == "stop" and not self._stop_signal:
                    self.child.pass_on(number)
                self._stop_signal = number
            case {"type": "size", "columns": int(columns), "rows": int(rows)}:
                self._resize(Terminal(columns=columns, rows=rows).behind(self._prefix))
            case {"type": "stacks"}:
                if (text := self.child.stack()) is not None:  # else the script answers
                    usage = usage_of(self.child.pid or os.getpid())
                    self.coordinator.send("stacks", text=text[-TEXT_LIMIT:], step=0, **usage)

    def _resize(self, terminal: Terminal) -> None:
        """Give the script's terminals the launcher's new size, and tell the script as a terminal does."""
        for stream in self._streams:
            if not stream.source.closed:
                terminal.resize(stream.source.fileno())
        if self._input is not None and self._input.sink is not None:
            terminal.resize(self._input.sink)
        self.child.pass_on(signal.SIGWINCH)

    def _see_failure(self) -> None:
        """End with the daemon of the MPI, another rank that has failed, or the server of the job."""
        ranks = self.coordinator
        if self._code is not None:
            return
        if self._daemon not in (None, os.getppid()):
            self._end(FAILED)
        elif ranks.code_of_failure or ranks.is_lost:
            self._ends_at = self._ends_at or time.monotonic() + GRACE_S
            if time.monotonic() >= self._ends_at:
                self._end(ranks.code_of_end())

    def _end(self, code: int) -> None:
        """End the script and all that it has started, because of another rank."""
        self._code = self._code or code
        if not self.child.pid or self._wakeup is None:  # the ranks have not met
            raise SystemExit(self._code)
        self.child.end(_END_S if self.child.is_command else 0.0)

    def _report(self, ending: Ending) -> None:
        """Tell the launcher, or else the other ranks, how this rank ends."""
        if self._code is not None:
            return
        child = self.child
        # An MPI sends SIGTERM too, when another rank has failed. A launcher says itself that it stops a job,
        # so its ranks look at that alone.
        was_asked = self._stop_signal if self._launcher is not None else child.passed & _REQUESTS
        passed = {self._stop_signal, *child.passed}
        ends = {STOPPED, 128 + signal.SIGTERM, *(128 + each for each in passed)}
        # After `except KeyboardInterrupt: save()`, a script may end with any code. Others may still save.
        is_exit = not (ending.signal or ending.traceback or ending.error)
        has_stopped = ending.code == STOPPED and "stopped" in child.said
        self._ends_on_request = has_stopped or bool(was_asked and (ending.code in ends or is_exit))
        if self._ends_on_request or not ending.is_failure:
            if ending.code == STOPPED and not has_stopped:
                self.coordinator.send("stopped")  # a command says so by its code alone
            # Not by os._exit(0) in the middle of its work.
            has_left = child.is_command or "left" in child.said or ending.is_failure
            self.coordinator.send("done" if has_left else "exited")
            return
        if self._launcher is not None:
            self.coordinator.send("failed", **ending.facts, **child.lack_of_memory)
        elif self.coordinator.hostnames and self.coordinator.claim_first_failure():
            line = ending.line(self.name)
            if line and not (ending.is_refusal or ending.traceback):  # the script has printed them
                print_error(line)
        self.coordinator.send("fail", code=ending.code)
