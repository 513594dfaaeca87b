"""One attempt of a rank: start the program, meet the other ranks, and wait in one loop until it has ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import DONE, FAILED, STOPPED, JobFailed, UserError, named_by, print_error
from mpiddp.hosts import private
from mpiddp.hosts.processes import adopt_orphans, usage_of
from mpiddp.hosts.sockets import reserve
from mpiddp.protocol import variables
from mpiddp.protocol.channel import SCRIPT as CHANNEL_SCRIPT
from mpiddp.protocol.channel import STREAMS, TEXT_LIMIT
from mpiddp.runtime.child import reap
from mpiddp.runtime.gpu import limit_threads, prepare
from mpiddp.runtime.gpu_readings import GpuReadings
from mpiddp.runtime.job.coordinator import GRACE_S, Coordinator, Server
from mpiddp.runtime.job.ending import Ending, Refused, ending_of
from mpiddp.runtime.rank import Rank

_END_S = 3.0  # for the processes to end after SIGTERM; a client of Docker first ends its container
_GPUS_S = 5.0  # for a look at the GPUs before the next attempt
_WAIT_MS, _WAIT_IN_GRACE_MS = 1000, 50  # for what may happen next
_REQUESTS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)


class Held(Exception):
    """The launcher holds this rank, which has not met the others yet."""


class Attempt:
    """One attempt of a rank, from the start of its program to its end."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.world, self._launcher = rank, rank.world, rank.launcher
        self.process = rank.process()
        self.child = self.process.child
        self.name = f"rank {self.world.rank} on {self.world.hostname}"
        self.coordinator = Coordinator(self.world, None)  # until it is connected
        # For torch's `@record`. No other user of the host can guess the name, and so create the file before.
        name = f"mpiddp-{os.urandom(16).hex()}-{self.world.rank}-error.json"
        self._error_file = Path(os.environ.get("TMPDIR") or "/tmp", name)
        self.again: Mapping[str, Any] | None = None  # what the launcher says of the next attempt
        self._has_met = False  # the other ranks
        self._is_held = False  # by the launcher, because some rank has failed
        self._stop_signal = 0  # with which the launcher has requested a stop
        self._ends_on_request = False
        self._code: int | None = None  # with which this rank ends because of another
        self._ends_at: float | None = None  # when another rank's failure ends this one

    def run(self) -> int:
        """Make the attempt. Returns the exit code of this rank, unless it is to begin `again`."""
        code = FAILED
        try:
            self._begin()
            ending = self._serve()
            code = ending.code
            self._is_held |= ending.is_failure and self._holds
        except Held:
            pass
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
        if self._is_held:
            return self._wait_for_launcher(code)
        if self._code is not None:
            return self._code
        if self._ends_on_request or code == DONE:
            # The first rank that exits with a code other than 0 ends the others, which may still save.
            self.coordinator.leave(waits=self._ends_on_request)
        return code

    @property
    def _holds(self) -> bool:
        """Whether this rank waits after its failure, instead of ending the others."""
        is_asked = self._stop_signal or self._ends_on_request or self._code is not None
        return self.rank.holds and not is_asked

    def _wait_for_launcher(self, code: int) -> int:
        """The script has ended. Wait until the launcher begins the next attempt, or ends this rank."""
        self.process.close()
        wrong = []
        if (self.coordinator.world.local_rank or 0) == 0:  # one rank of each host looks
            from mpiddp.hosts.gpu_faults import wrong_here

            wrong = wrong_here(os.environ, timeout_s=_GPUS_S)
        self.coordinator.send("held", error="\n".join(wrong)[:TEXT_LIMIT])
        while self.again is None and self._code is None:
            self._wait()
        if self.again is not None and self.coordinator.connection is not None:
            self.coordinator.connection.close()
        return self._code or code

    def _begin(self) -> None:
        """Start the script, and meet the other ranks meanwhile."""
        child, world, launcher, rank = self.child, self.world, self._launcher, self.rank
        problem: UserError | JobFailed | None = None
        try:
            prepare(world)
            rank.program.check()
            if not (child.is_command or child.runs):
                self.process.start(os.environ)
        except (UserError, JobFailed) as error:
            problem = error
        if launcher is not None:
            self._connect(launcher)
        if isinstance(problem, JobFailed):  # else all ranks refuse it
            raise problem
        # From here on, the script's Python starts beside this process: what it needs no earlier loads now.
        from mpiddp.runtime.rendezvous.meet import joining_timeout_s, meet
        from mpiddp.runtime.rendezvous.result import RankInfo

        files = [] if world.local_world_size == world.world_size else rank.program.files
        info = RankInfo.of_this_process(world, str(problem or ""), files)
        try:
            self.coordinator, env, store = meet(self.coordinator, info)
        finally:
            if rank.kept:  # all ranks have taken it
                private.remove(rank.kept)
                rank.kept = ""
        # Not before: the process beside rank 0 that serves the channel, where no launcher does, is no orphan
        # of the script's. Not later: the spare process is one.
        adopt_orphans()
        rank.catch_signals()
        self._has_met = True
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
                self.process.start(os.environ)
        else:
            has_spare = rank.holds and child.said.get("ready", {}).get("has_torch")
            spare = rank.offer_spare() if has_spare else []
            variables_of_script = {**rank.own, **env}
            child.go(rank.program, variables_of_script, store, spare, is_restart=bool(rank.own))

    def _connect(self, launcher: Server) -> None:
        """Connect to the launcher: the messages, and the streams that it shows."""
        world = self.world
        self.coordinator = Coordinator(world, launcher)
        self.coordinator.has_launcher = True
        self.coordinator.on_news = self._obey
        self.coordinator.send("started", host=world.hostname, pid=os.getpid())
        self.process.connect(launcher)
        if folder := os.environ.get(variables.LOG_DIR):
            self._log_to(Path(folder).absolute(), "--log-dir")

    def _log_to(self, folder: Path, option: str = "") -> None:
        """Write the streams to files of this folder. That of stderr will contain a traceback."""
        stem = f"rank_{self.world.rank:05d}"
        paths = {number: folder / f"{stem}.{name[3:]}" for number, name in STREAMS.items()}
        with named_by(option):
            folder.mkdir(parents=True, exist_ok=True)
            for stream in self.process.streams:
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
        readings = self._read_gpus()
        while child.status is None:
            self._wait()
        ending = child.ending()
        is_success = not (ending.is_failure or self._stop_signal or self._code)
        if readings and is_success:
            readings.stop()
        streams = self.process.streams
        left = child.left_behind() if is_success and streams else {}
        if left:
            named = ", ".join(f"pid {pid} ({command})" for pid, command in left.items())
            streams[-1].say(f"ended what the script has left behind: {named}.")
        self._report(ending)
        if child.end(_END_S):  # what is left cannot be killed
            for stream in streams:
                stream.source.close()
        if readings:
            readings.stop()
        while not self.process.is_done:
            self._wait()
        return ending

    def _read_gpus(self) -> GpuReadings | None:
        """Read what the GPUs of this host do from now on, if this is its first rank."""
        ranks = self.coordinator
        if self._launcher is None or ranks.world.local_rank != 0:
            return None
        here = [at for at, host in enumerate(ranks.hostnames) if host == self.world.hostname]
        readings = GpuReadings(ranks.world, here, os.environ, ranks.send)
        readings.start()
        return readings

    def _wait(self) -> None:
        """Act on what happens next."""
        child, channel, process, rank = self.child, self.coordinator, self.process, self.rank
        connection = None if channel.is_lost else channel.connection
        poll = select.poll()
        process.register(poll)
        for file in (child.control, rank.wakeup, connection):
            if file is not None:
                poll.register(file, select.POLLIN)
        ready = dict(poll.poll(_WAIT_IN_GRACE_MS if self._ends_at else _WAIT_MS))
        if manners := process.act(ready):
            channel.send("terminal", **manners._asdict())
        reap()  # then, what an ended script has said last is there
        child.hear()
        if log := child.said.pop("log_to", None):
            self._log_to(Path(log["folder"]))
        if rank.spare is not None:
            rank.spare.child.hear()
            child.others.add(rank.spare.child.pid)
        if connection is not None and connection.fileno() in ready:
            channel.receive()
        self._see_failure()
        if rank.wakeup is not None and rank.wakeup in ready:
            for number in os.read(rank.wakeup, 4096):
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
                self._resize(columns, rows)
            case {"type": "hold"}:
                self._hold()
            case {"type": "again"}:
                self.again = facts
            case {"type": "stacks"}:
                if (text := self.child.stack()) is not None:  # else the script answers
                    usage = usage_of(self.child.pid or os.getpid())
                    self.coordinator.send("stacks", text=text[-TEXT_LIMIT:], **usage)

    def _resize(self, columns: int, rows: int) -> None:
        """Give the script's terminals the launcher's new size, and tell the script as a terminal does."""
        rank = self.rank
        terminal = rank.shown.terminal._replace(columns=columns, rows=rows).behind(rank.prefix)
        rank.shown = rank.shown._replace(terminal=terminal)
        for process in (self.process, rank.spare):
            if process is not None:
                process.resize(terminal)
        self.child.pass_on(signal.SIGWINCH)

    def _hold(self) -> None:
        """End the script, because another rank has failed, and wait for the launcher."""
        if not self.rank.holds:
            self._end(FAILED)
            return
        if self.child.status is None or not self._has_met:
            self._is_held = True
        if not self._has_met:
            raise Held
        self.child.end(_END_S if self.child.is_command else 0.0)

    def _see_failure(self) -> None:
        """End with the daemon of the MPI, another rank that has failed, or the server of the job."""
        ranks = self.coordinator
        if self._code is not None:
            return
        if self.rank.daemon not in (None, os.getppid()):
            self._end(FAILED)
        elif ranks.code_of_failure or ranks.is_lost:
            self._ends_at = self._ends_at or time.monotonic() + GRACE_S
            if time.monotonic() >= self._ends_at:
                self._end(ranks.code_of_end())

    def _end(self, code: int) -> None:
        """End the script and all that it has started, because of another rank."""
        self._code = self._code or code
        if not self.child.pid or not self._has_met:
            raise SystemExit(self._code)
        self.child.end(_END_S if self.child.is_command else 0.0)

    def _report(self, ending: Ending) -> None:
        """Tell the launcher, or else the other ranks, how this rank ends."""
        if self._code is not None or self._is_held:
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
        if not self._holds:
            self.coordinator.send("fail", code=ending.code)
