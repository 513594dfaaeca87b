"""One rank from its start to its end: `mpiddp run` is what mpirun starts, and the script is its child.

    mpirun … python -m mpiddp run train.py --lr 0.1
    mpirun … python -m mpiddp run -- ./any_command

The agent is the standard library and mpi4py, never torch. It starts the script's Python at once, which
imports torch while the agent meets the others over MPI. Then one line down a pipe says "go". From then on it
waits in one loop for the script's output, for the launcher, for signals and for the end of the script, which
it sees by wait(). It alone says how the script ended. A command begins once the ranks have met, and ends in
the same way.
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
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.errors import FAILED, STOPPED, JobFailed, UserError, print_error
from mpiddp.hosts.processes import (
    OomKills,
    adopt_orphans,
    descendants,
    group_of,
    kills_in,
    processor_time,
    signal_at_parents_end,
)
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.paths import cause_of, check_program, named_by
from mpiddp.protocol.channel import Lines
from mpiddp.protocol.messages import (
    GO,
    INPUT,
    LINE_LIMIT,
    OUTPUT_PROCESS,
    STREAMS,
    TEXT_LIMIT,
    is_shown,
    notice_silence,
    recorded_error,
)
from mpiddp.protocol.variables import (
    ADDRESS,
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    JOB,
    LOG_DIR,
    OUTPUT,
    REPORT,
    SECRET,
    VERBOSE,
    is_restart,
)
from mpiddp.runtime.child import Child
from mpiddp.runtime.gpu import limit_threads, prepare
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.connect import Server, connect_to_launcher
from mpiddp.runtime.job.ending import Ending, Refused, ending_of, ending_of_process
from mpiddp.runtime.job.stop import PASSED
from mpiddp.runtime.output import OutputStream, new_stream
from mpiddp.runtime.program import (
    COMMAND,
    FUNCTION,
    MODULE,
    SCRIPT,
    Program,
    command_environment,
    parse,
)
from mpiddp.runtime.script import START, Go
from mpiddp.text import escaped
from mpiddp.world import World, is_joined

if TYPE_CHECKING:
    from mpiddp.runtime.job.coordinator import Coordinator
    from mpiddp.runtime.rendezvous.result import RankInfo, RendezvousResult

_PYTHON = (SCRIPT, MODULE, FUNCTION)
_SOCKETS_PER_RANK = 3  # of torch's store: that of `process_group`, a script's own, and one to spare
_END_S = 3.0  # for the processes to end after SIGTERM; a client of Docker first ends its container
_KILLED_S = 5.0  # for killed processes to end, unless a disk or a driver blocks them
_GRACE_S = 1.0  # in which this rank may end by itself once another has failed
_AWAY_S = 600.0  # until a launcher that reads nothing is taken for gone, once the script has ended
# For the kernel to interrupt the script, which then writes its stack; and in all.
_STACK_S, _STACK_LIMIT_S = 0.05, 0.8
# A script that prints many short lines would wake the agent for each.
_SHORT, _PAUSE_S = 2048, 0.005
_NEVER = float("inf")
_OF_OURS = ("<string>", str(Path(__file__).with_name("script.py")))  # they lead to the script
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_REQUESTS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})


def main(argv: list[str]) -> int:
    """Run `mpiddp run ARGV`, and return the exit code."""
    return run_rank(parse(argv))


def run_rank(program: Program) -> int:
    """Be a rank of a job: start `program`, meet the others, and return its exit code."""
    if is_joined(os.environ):  # a rank's command, or a process that it has started
        python = {SCRIPT: [sys.executable], MODULE: [sys.executable, "-m"]}.get(program.kind, [])
        argv = [*python, program.name, *program.args]
        program.check()
        check_program(argv[0], os.environ.get("PATH"))
        os.execvp(argv[0], argv)
    # Not by os._exit: MPICH tells its mpirun in a handler of atexit that a rank has finalized MPI.
    return Agent(program, World.from_env()).run()


class Agent:
    """One rank."""

    def __init__(self, program: Program, world: World) -> None:
        self.program = program
        self.world = world
        self.name = f"rank {world.rank} on {world.hostname}"
        self.channel: JobChannel | None = None
        self.coordinator: Coordinator | None = None
        self.child: Child | None = None
        self.control: socket.socket | None = None  # to the script
        self.streams: dict[int, OutputStream] = {}
        self._writers: dict[int, int] = {}  # the script's ends of the streams
        self._stdin: int | None = None
        address, key = os.environ.pop(ADDRESS, ""), os.environ.pop(SECRET, "")
        self._launcher = Server(address, key) if address and key else None
        self._selection = os.environ.pop(OUTPUT, "") if self._launcher else ""
        self._parent = os.getppid()
        self._problem = ""  # why this rank cannot begin
        self._is_ready = program.kind not in _PYTHON
        self._reason: dict[str, Any] = {}  # why the script fails, in its own words
        self._is_stopping = self._has_stopped = self._ends_on_request = False
        self._has_left = program.kind == COMMAND  # not by os._exit(0) in the middle of its work
        self._passed: set[int] = set()
        self._wakeup: int | None = None  # readable when a signal has arrived
        self._said = Lines(LINE_LIMIT)  # by the script, over the control connection
        self._frames: list[str] = []  # of its main thread
        self._stack_at = self._stack_until = _NEVER  # when to send them, and when to give up
        self._code: int | None = None  # with which this rank ends because of another
        self._ends_at = _NEVER  # when another rank's failure ends this one
        self._ended_at = 0.0  # when the script ended
        self._kills_at = _NEVER  # when SIGKILL follows a SIGTERM
        self._memory_group = group_of()
        self._kills_before = self._kernel_kills()  # when this rank starts

    # --- beginning ---

    def run(self) -> int:
        try:
            self._begin()
            ending = self._serve()
        except BaseException as error:
            ending = ending_of(error)
            if self._launcher is not None:
                self._report(ending)
            elif self.channel is not None and ending.is_failure and not isinstance(error, Refused):
                self.channel.fail(ending.code)
            if isinstance(error, (JobFailed, UserError)) and self._launcher and self.channel:
                return ending.code  # the launcher prints it
            raise
        finally:
            self._clean_up()
        if self._code is not None:
            return self._code
        if self.coordinator is not None and (self._ends_on_request or not ending.is_failure):
            # The first rank that exits with a code other than 0 ends the others, which may still save.
            self.coordinator.leave(waits=self._ends_on_request)
        elif ending.signal and self.program.kind != COMMAND:  # a shell says 128 + N of a command
            _end_by(ending.signal)
        return ending.code

    def _begin(self) -> None:
        """Start the script, and meet the other ranks meanwhile."""
        if _has_daemon(self.world):
            signal_at_parents_end(signal.SIGKILL)
        adopt_orphans()
        # Whoever ignores it has no children to wait for, and a parent's choice is inherited.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A SIGKILL of the launcher leaves the last output to this process.
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(OUTPUT_PROCESS)
        try:
            prepare(self.world)
            self.program.check()
        except UserError as problem:
            self._problem = str(problem)
        allow_open(_SOCKETS_PER_RANK * self.world.world_size + OPEN_BESIDES)
        self._open_streams()
        if self.program.kind in _PYTHON and not self._problem:
            self._start_script()
        if self._launcher is not None:
            self._connect(self._launcher)
        # From here on, the script's Python starts beside this process: what it needs no earlier loads now.
        from mpiddp.runtime.rendezvous.meet import meet

        with meet(self.world, self._own_info, self.channel) as met:
            self._met(*met)
        # The process beside rank 0 that serves the channel, where no launcher does.
        others = set(descendants(os.getpid(), but={self.child.pid} if self.child else ()))
        if self.program.kind == COMMAND:
            self._start_command()
        assert self.child is not None
        self.child.others = others

    def _open_streams(self) -> None:
        """Let the script write to this process, if `mpiddp launch` has requested it."""
        try:
            for number in STREAMS if self._selection else ():
                reader, self._writers[number] = new_stream(number)
                self.streams[number] = OutputStream(number, reader, self.name)
        except OSError as error:
            raise JobFailed(f"{self.name} cannot open its output: {error.strerror}.") from None

    def _start_script(self) -> None:
        self.control, theirs = socket.socketpair()
        file = theirs.fileno()
        program = self.program
        argv = [sys.executable, "-c", START, str(file), program.kind, program.name, *program.args]
        self._start(argv, os.environ, {file: file})
        theirs.close()
        self.control.setblocking(False)

    def _start_command(self) -> None:
        """Start the command on all ranks, or on none."""
        assert self.coordinator is not None
        command = [self.program.name, *self.program.args]
        env = command_environment(os.environ)
        with self.coordinator.all_or_none():
            check_program(command[0], env.get("PATH"))
            try:
                files = {} if self._stdin is None else {0: self._stdin}
                self._start(command, env, files)
            except OSError as error:
                hint = " A script begins with a line such as #!/bin/sh."
                hint *= error.errno == errno.ENOEXEC
                sentence = f"{escaped(command[0])} cannot be started: {error.strerror}.{hint}"
                raise cause_of(error)(sentence) from None

    def _start(self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[int, int]) -> None:
        is_command = self.program.kind == COMMAND
        everything = {**self._writers, **files}
        try:
            self.child = Child(argv, env, everything, is_command=is_command)
        finally:
            for writer in self._writers.values():
                os.close(writer)
            self._writers = {}

    def _connect(self, launcher: Server) -> None:
        """Connect to the launcher: the messages, the streams that it shows, and stdin."""
        world = self.world
        channel = JobChannel(launcher, connect_to_launcher(launcher, world, "hello"), world)
        channel.on_news = self._obey
        self.channel = channel
        self._send("started", host=world.hostname, pid=os.getpid())
        for number, stream in self.streams.items():
            if is_shown(self._selection, world.rank, number):
                facts = {"stream": number, "host": world.hostname}
                connection = connect_to_launcher(launcher, world, "output", **facts).socket
                notice_silence(connection, is_read_slowly=True)
                stream.show(connection)
        if self.streams and (folder := os.environ.get(LOG_DIR)):
            from mpiddp.runtime.job.reports import open_logs

            with named_by("--log-dir", has_run=is_restart(os.environ)):
                files, path = open_logs(Path(folder).absolute(), world.rank)
            self._write_to(files)
            self._send("log", path=str(path))
        if world.rank == 0:
            connection = connect_to_launcher(launcher, world, INPUT).socket
            with contextlib.suppress(OSError):  # the launcher is ending, so stdin is at its end
                connection.sendall(GO)  # what follows is no message
            self._stdin = connection.detach()
        else:
            self._stdin = os.open(os.devnull, os.O_RDONLY)

    def _own_info(self) -> RankInfo:
        from mpiddp.runtime.rendezvous.result import RankInfo

        self._wait_until_ready()
        files: list[tuple[str, str]] = []
        if not self._problem and self.world.local_world_size != self.world.world_size:
            try:
                files = self.program.files
            except OSError as error:
                self._problem = f"{error.filename}: {error.strerror}."
        return RankInfo.of_this_process(self.world, self._problem, files)

    def _wait_until_ready(self) -> None:
        """Wait until the script has imported torch. A rank whose script hangs there has not joined."""
        from mpiddp.runtime.rendezvous.meet import joining_timeout_s

        while not (self._is_ready or self._problem):
            self._wait()
            self._raise_if_ended()
        self._send("joining", timeout_s=joining_timeout_s())

    def _raise_if_ended(self) -> None:
        """Raise SystemExit if the script has ended before the ranks have met."""
        assert self.child is not None
        self.child.reap()
        if self._code is not None:
            raise SystemExit(self._code)
        if self.child.status is not None:
            ending = ending_of_process(self.child.status)
            raise JobFailed(f"{ending.line(self.name)}, before it had joined.")

    def _met(self, coordinator: Coordinator, result: RendezvousResult) -> None:
        """The ranks have met: let the script begin."""
        from mpiddp.runtime.rendezvous.placement import table

        self._catch_signals()
        self.coordinator, self.channel = coordinator, coordinator.channel
        if self.channel is not None:
            self.channel.on_news = self._obey
        world = coordinator.world
        env = result.variables(self.channel)
        threads = None
        if self.world.local_world_size is None and (threads := limit_threads(world)):
            env["OMP_NUM_THREADS"] = str(threads)
        if self._launcher is None:
            os.environ.pop(JOB, None)
        os.environ.update(env)
        if self.world.rank == 0 and os.environ.get(REPORT):
            print(table(result.infos), flush=True)
        if os.environ.get(VERBOSE):
            line = f"{self.name} uses {result.interface}\n"
            if world.rank == 0:
                where = f"{world.master_addr} port {world.master_port}"
                line = f"master address {where}: {result.reason}\n{line}"
            print(line, end="", flush=True)
        if self.program.kind in _PYTHON:
            self._go(env, result, threads)
        elif result.listener is not None:
            reserve(result.listener)

    def _go(self, env: dict[str, str], result: RendezvousResult, threads: int | None) -> None:
        assert self.control is not None
        world = result.world
        files = {}
        if result.listener is not None:
            files["store"] = result.listener.fileno()
        if self._stdin is not None:
            files["stdin"] = self._stdin
        go = Go(
            rank=world.rank,
            world_size=world.world_size,
            hostname=world.hostname,
            env=env,
            server=[env[CHANNEL], env[CHANNEL_SECRET]] if CHANNEL in env else None,
            has_launcher=self._launcher is not None,
            files=list(files),
            threads=threads,
            forbids_mpi=self.world.launcher.speaks_mpi,
        )
        self.control.setblocking(True)
        line = json.dumps(go._asdict()).encode() + b"\n"
        with contextlib.suppress(ConnectionError):  # the script has ended
            sent = socket.send_fds(self.control, [line], list(files.values()))
            self.control.sendall(line[sent:])
        self.control.setblocking(False)
        if result.listener is not None:
            result.listener.close()
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    # --- the loop ---

    def _serve(self) -> Ending:
        """Wait for all that may happen until the script has ended, and all that it has started."""
        child = self.child
        assert child is not None
        ending: Ending | None = None
        self._catch_signals()
        if _has_daemon(self.world):
            signal_at_parents_end(signal.SIGTERM)
            if os.getppid() != self._parent:
                self._end(FAILED)
        while True:
            child.reap()
            if child.status is not None and ending is None:
                ending = self._note_end(child.status)
            if ending is not None and self._is_over(child):
                return ending
            self._wait()

    def _catch_signals(self) -> None:
        """From now on, a file is readable when a signal has arrived, and contains its number.

        Before, a signal ends this process, and the script with it: MPI holds the interpreter's lock.
        """
        if self._wakeup is not None:
            return
        self._wakeup, writer = os.pipe()
        for file in (self._wakeup, writer):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*PASSED, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def _wait(self) -> None:
        """Act on what happens next."""
        poll, channel, wakeup = select.poll(), self.channel, self._wakeup
        for stream in self.streams.values():
            stream.register(poll)
        for file in (wakeup, self.control):
            if file is not None:
                poll.register(file, select.POLLIN)
        if channel is not None and not channel.is_lost:
            poll.register(channel.connection, select.POLLIN)
        times = [self._stack_at, self._ends_at, self._kills_at]
        times += [stream.flushes_at for stream in self.streams.values()]
        wait_s = min(1.0, max(0.0, min(times) - time.monotonic()))
        ready = dict(poll.poll(1 + 1000 * wait_s))
        longest = max((stream.act(ready) for stream in self.streams.values()), default=0)
        if self.control is not None and self.control.fileno() in ready:
            self._hear_script()
        if channel is not None and (channel.has_early or channel.connection.fileno() in ready):
            for facts in channel.receive():
                self._obey(facts)
        if wakeup is not None and wakeup in ready:
            for number in os.read(wakeup, 4096):
                self._on_signal(number)
        self._see_failure()
        now = time.monotonic()
        if now >= self._stack_at:
            self._send_stacks()
        if now >= self._ends_at:
            self._end(self.channel.code_of_failure if self.channel is not None else FAILED)
        if now >= self._kills_at and self.child is not None:
            self._kills_at = now + 1.0
            self.child.signal_all(signal.SIGKILL)
        if 0 < longest < _SHORT:
            time.sleep(_PAUSE_S)

    def _obey(self, facts: Mapping[str, Any]) -> None:
        """Act on a message of the launcher."""
        match facts:
            case {"type": "end", "code": int(code)}:
                self._end(code)
            case {"type": "stop"}:  # to a script that does not talk to the launcher itself
                self._is_stopping = True
                if signal.SIGTERM not in self._passed:
                    self._on_signal(signal.SIGTERM)
            case {"type": "stopping"}:
                self._is_stopping = True
            case {"type": "stacks"}:
                self._ask_for_stack()

    def _see_failure(self) -> None:
        """Another rank has failed, or the server of the job is gone."""
        channel = self.channel
        if channel is None or self._code is not None:
            return
        if channel.code_of_failure:  # also if the server has ended since
            self._ends_at = min(self._ends_at, time.monotonic() + _GRACE_S)
        elif channel.is_lost:
            lost = "the launcher" if self._launcher is not None else "rank 0"
            if self._launcher is not None or self.world.local_rank == 0:
                sentence = f"{self.name}: lost the connection to {lost}; exiting.\n"
                with contextlib.suppress(OSError):
                    os.write(2, sentence.encode())
            self._end(FAILED)

    def _on_signal(self, number: int) -> None:
        """Pass a signal on, or end with the daemon of the MPI."""
        if number == signal.SIGCHLD:
            return  # every turn of the loop collects the children
        if number == signal.SIGTERM and os.getppid() != self._parent:
            self._end(FAILED)
            return
        self._passed.add(number)
        if self.child is not None:
            self.child.pass_on(number)

    def _end(self, code: int) -> None:
        """End the script and all that it has started, because of another rank."""
        if self._code is None:
            self._code = code
        self._ends_at = _NEVER
        if self.child is None:
            raise SystemExit(code)
        if self.child.is_command and self._kills_at == _NEVER:
            self.child.signal_all(signal.SIGTERM)
            self.child.signal_all(signal.SIGCONT)
            self._kills_at = time.monotonic() + _END_S
        elif not self.child.is_command:
            self._kills_at = 0.0

    # --- the script ---

    def _hear_script(self) -> None:
        """Take what the script says over the control connection."""
        assert self.control is not None
        files: list[int] = []
        try:
            chunk, files, _, _ = socket.recv_fds(self.control, 1 << 16, len(STREAMS))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:  # it has ended, or has closed all files
            self.control.close()
            self.control = None
            return
        if files:
            self._write_to(files)
        for line in self._said.split(chunk):
            if line.startswith(b"{"):
                self._hear(json.loads(line))
            else:
                self._frames.append(line.decode(errors="replace"))

    def _hear(self, facts: dict[str, Any]) -> None:
        match facts["type"]:
            case "ready":
                self._is_ready = True
            case "error":
                self._reason = facts
            case "stopped":
                self._has_stopped = True
            case "left":
                self._has_left = True

    def _write_to(self, files: Sequence[int]) -> None:
        for stream, file in zip(self.streams.values(), files, strict=True):
            stream.write_to(file)

    def _ask_for_stack(self) -> None:
        if self.child is None or self.program.kind == COMMAND:
            self._send("stacks", text="", step=0, **self._usage())
            return
        self._frames = []
        self._stack_at = time.monotonic() + _STACK_S
        self._stack_until = time.monotonic() + _STACK_LIMIT_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGURG)

    def _send_stacks(self) -> None:
        """Send the main thread's stack. A script that is stopped does not answer."""
        now = time.monotonic()
        is_late = now >= self._stack_until
        self._stack_at = _NEVER if self._frames or is_late else now + _STACK_S
        if text := stack_of(self._frames):
            self._send("stacks", text=text[-TEXT_LIMIT:], step=0, **self._usage())

    def _usage(self) -> dict[str, Any]:
        from mpiddp.runtime.job.reports import state_of

        pid = os.getpid() if self.child is None else self.child.pid
        return {"cpu_s": processor_time(pid), "state": state_of(pid)}

    # --- the end ---

    @property
    def _was_asked(self) -> bool:
        """Whether a stop has been requested. An MPI sends SIGTERM too, when another rank has failed."""
        if self._launcher is not None:
            return self._is_stopping
        return bool(self._passed & _REQUESTS)

    def _note_end(self, status: int) -> Ending:
        """The script has ended: report how, and end what it has left."""
        while self.control is not None and select.select([self.control], [], [], 0.0)[0]:
            self._hear_script()
        ending = self._ending(status)
        self._report(ending)
        assert self.child is not None
        if self._kills_at == _NEVER and self.child.left:
            self.child.signal_all(signal.SIGTERM)
            self._kills_at = time.monotonic() + _END_S
        self._ended_at = time.monotonic()
        return ending

    def _ending(self, status: int) -> Ending:
        """What wait() says, with the script's own reason."""
        ending, reason = ending_of_process(status), self._reason
        if ending.code == STOPPED and (self._has_stopped or self._is_stopping):
            return ending
        if not ending.is_failure:
            return ending
        # A script that has failed may be ended before it has printed all.
        if reason and (reason["code"] == ending.code or ending.signal == signal.SIGTERM):
            ending = ending._replace(code=reason["code"], signal=0)
            sentence, traceback = reason["error"], reason["traceback"]
            return ending._replace(
                sentence=sentence, traceback=traceback, is_verdict=reason["is_verdict"]
            )
        return ending._replace(sentence=recorded_error(os.environ.get(ERROR_FILE, "")))

    def _report(self, ending: Ending) -> None:
        """Tell the launcher, or else the other ranks, how this rank ends."""
        if self._code is not None:
            return
        ends = {STOPPED, 128 + signal.SIGTERM, *(128 + each for each in self._passed)}
        is_stopped = ending.code == STOPPED and self._has_stopped
        self._ends_on_request = is_stopped or (ending.code in ends and self._was_asked)
        if self._ends_on_request and ending.code == STOPPED and not self._has_stopped:
            self._send("stopped")  # a command says so by its code alone
        if self._ends_on_request or not ending.is_failure:
            self._send("done" if self._has_left or ending.is_failure else "exited")
        elif self._launcher is not None:
            self._send(
                "failed",
                code=ending.code,
                error=ending.sentence[:TEXT_LIMIT],  # the beginning is the useful part
                traceback=ending.traceback[-TEXT_LIMIT:],
                is_verdict=ending.is_verdict,
                signal=ending.signal,
                **self._lack_of_memory(),
            )
        elif self.coordinator is not None and self.coordinator.claim_first_failure():
            line = ending.line(self.name)
            if line and not (ending.is_refusal or ending.traceback):  # the script has printed them
                print_error(line)
        if ending.is_failure and not self._ends_on_request and self.channel is not None:
            self.channel.fail(ending.code)

    def _lack_of_memory(self) -> dict[str, int | None]:
        """The kernel's kills in this rank's control group since its start, if there were any."""
        now, before = self._kernel_kills(), self._kills_before
        if now is None or before is None or now.count <= before.count:
            return {}
        return {"oom_kills": now.count - before.count, "memory_limit": now.limit_bytes}

    def _kernel_kills(self) -> OomKills | None:
        return None if self._memory_group is None else kills_in(self._memory_group)

    def _is_over(self, child: Child) -> bool:
        """Whether nothing of the script is left, and all that it has written has been sent."""
        late_s = time.monotonic() - self._ended_at
        if child.left and late_s < _END_S + _KILLED_S:
            return False
        if late_s >= _END_S + _KILLED_S:  # what is left cannot be killed
            for stream in self.streams.values():
                stream.end()
        return all(stream.is_done for stream in self.streams.values()) or late_s >= _AWAY_S

    def _clean_up(self) -> None:
        """End the script of a rank that could not begin."""
        if self.child is not None and self.child.status is None:
            self.child.signal_all(signal.SIGKILL)
        if file := os.environ.get(ERROR_FILE):
            with contextlib.suppress(OSError):
                os.unlink(file)  # noqa: PTH108

    def _send(self, kind: str, **facts: object) -> None:
        if self._launcher is not None and self.channel is not None:
            self.channel.send(kind, b"", **facts)


def _has_daemon(world: World) -> bool:
    """Whether nothing would end this rank without its parent, the daemon of MPI or Slurm."""
    return world.launcher.speaks_mpi or world.launcher.name == "slurm"


def _end_by(number: int) -> None:
    """End as the script has ended, so that the MPI sees the signal too."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def reserve(listener: socket.socket) -> None:
    """Keep the port of torch's store for a command, whose own process listens there."""
    address = listener.getsockname()
    family = listener.family
    listener.close()
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(address)
    held.detach()  # as long as this process lives


def stack_of(frames: Sequence[str]) -> str:
    """The main thread's stack as the traceback module prints it, from what faulthandler writes."""
    found = _FRAME.findall("\n".join(frames))
    lines = [
        f'  File "{file}", line {number}, in {name}\n    {linecache.getline(file, int(number)).strip()}\n'
        for file, number, name in reversed(found)
        if file not in _OF_OURS
    ]
    return f"thread MainThread:\n{''.join(lines)}" if lines else ""
