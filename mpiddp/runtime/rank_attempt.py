"""One attempt of a rank: a Rank comes in, its program runs among the others, and the exit code goes out."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any

from mpiddp import errors, sinks
from mpiddp.errors import DONE, FAILED, STOPPED, JobFailed, NoAnswer, UserError
from mpiddp.hosts.processes import adopt_orphans
from mpiddp.protocol import variables
from mpiddp.protocol.channel import TEXT_LIMIT, silence_s
from mpiddp.protocol.orders import Orders
from mpiddp.protocol.variables import SAVE_GRACE_S
from mpiddp.runtime.child import Child, caught_signals, reap
from mpiddp.runtime.gpu import prepare, reading_gpus
from mpiddp.runtime.helpers import Helpers
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import CLAIM, GRACE_S, Coordinator
from mpiddp.runtime.job.ending import Ending, Refused, ending_of
from mpiddp.runtime.rank import (
    Rank,
    variables_of_open_mpi,
    variables_of_script,
    wrong_with_host,
)
from mpiddp.runtime.store_server import StoreServer

_END_S = 3.0  # the time after SIGTERM, in which for example a client of Docker ends its container
_SPARE_S = 5.0  # in which a hot spare takes a message
_WAIT_MS, _WAIT_IN_GRACE_MS = 1000, 50  # the loop looks at the clock this often if nothing happens
_LONG_WRITE_S = 1.0  # the launcher learns of a write that takes longer


class State(Enum):
    """The state of an attempt. docs/architecture.md has what each event does in each."""

    MEETING = auto()  # the ranks meet, and the script's Python starts meanwhile
    RUNNING = auto()  # until the program has ended
    ENDING = auto()  # the others make the program end
    HELD = auto()  # it has ended, and the launcher may begin the next attempt
    OVER = auto()  # nothing is left to run


class EndedFromOutside(Exception):
    """The others make this program end. Its end is not reported."""


class RankAttempt:
    """One attempt of a rank. `spare` is the child that an earlier attempt has started for this one."""

    def __init__(
        self, rank: Rank, helpers: Helpers, store: StoreServer, spare: Child | None = None
    ) -> None:
        self.rank, self.world, self.holds = rank, rank.world, rank.orders.holds
        self.helpers, self.store = helpers, store
        self.again: Orders | None = None  # for the next attempt
        self.spare: Child | None = None  # imports torch for the next attempt
        self.child = spare or Child(rank, helpers)
        if spare is not None:
            helpers.have_ended([spare.pid])  # it is the program now
            spare.pass_on(signal.SIGCONT)  # somebody may have stopped it
        self.coordinator = Coordinator(self.world)
        # For torch's `@record`. No other user of the host can guess the name, and so create the file before.
        name = f"mpiddp-{os.urandom(16).hex()}-{self.world.rank}-error.json"
        folder = os.environ.get("TMPDIR") or "/tmp"
        self._error_file = Path(folder if os.access(folder, os.W_OK | os.X_OK) else "/tmp", name)
        self.state = State.MEETING
        self._next: State | None = (
            None  # HELD, or OVER because of the others; None: the program decides
        )
        self._is_asked = False  # the launcher has requested a stop
        self._told_write = ""  # the file of which the launcher knows that the script writes it
        self._code = FAILED  # the exit code of this rank
        self._ends_at: float | None = None  # when a failure elsewhere ends the program
        self._signals: int | None = None  # a file with the signals, once the ranks have met
        self._readings = ExitStack()  # the readings of the GPUs of this host

    def run(self) -> int:
        """Make the attempt. Returns the exit code of this rank, unless it is to begin `again`."""
        stops = False
        try:
            self._begin()
            stops = self._serve()
        except EndedFromOutside:
            self._end_script()
            self._clear(_END_S if self.child.is_command else 0.0)
            self._tell_files()
        except BaseException as error:
            ending = ending_of(error)
            self.holds = False  # this process ends
            if self.coordinator.has_launcher or not isinstance(error, Refused):
                self._report(ending)
            is_reported = self.coordinator.has_launcher or self.coordinator.hostnames
            if isinstance(error, JobFailed | UserError) and is_reported:
                return ending.code
            raise
        finally:
            if self.child.runs:  # this rank could not begin
                self.child.end(0.0)
            self._error_file.unlink(missing_ok=True)
        if self._next is State.HELD:
            self._wait_for_launcher()
        else:
            self._leave(stops=stops)
        return self._code

    def _end_script(self) -> None:
        """End the script because of a failure elsewhere: wait for a save, and send SIGTERM."""
        child = self.child
        if child.is_command or not child.has_begun:
            return
        self._ends_at = time.monotonic()
        save_deadline = self._ends_at + SAVE_GRACE_S
        while child.runs and time.monotonic() < save_deadline:
            if not child.saves and child.may_end():
                break
            self._wait()
        # should_stop() takes SIGTERM for a request, on which the ranks cannot agree any more.
        if "supports_stop" in child.messages:
            return
        child.pass_on(signal.SIGTERM)
        child.pass_on(signal.SIGCONT)
        deadline = time.monotonic() + self.rank.orders.failed_grace_s
        while child.runs and time.monotonic() < (save_deadline if child.saves else deadline):
            self._wait()

    def _leave(self, *, stops: bool) -> None:
        """Tell the others that no script runs here, and wait until none runs elsewhere, if that matters.

        Other ranks may need torch's store, which ends with this process. After a failure or a stop, the first
        rank that exits makes the MPI end the others at once.
        """
        ranks, self.state = self.coordinator, State.OVER
        is_done = self._next is not State.OVER and (stops or self._code == DONE)
        waits = stops or not is_done or self.store.runs
        is_limited = not (is_done or ranks.has_launcher)
        limit_s = GRACE_S + self.rank.orders.failed_grace_s + _END_S if is_limited else None
        ranks.give("ended", None, timeout_s=limit_s)
        with suppress(NoAnswer):
            while waits and ranks.connection and not (ranks.is_lost or ranks.given("ended")):
                if self.rank.daemon not in (None, os.getppid()):
                    break
                self._wait()
        if is_done:
            ranks.send("leave")

    def _wait_for_launcher(self) -> None:
        """The program has ended. Wait until the launcher begins the next attempt, or ends this rank."""
        self.state = State.HELD
        self.child.close()
        self._ends_at = None
        self.coordinator.send("held", error=wrong_with_host(self.coordinator.world))
        while self.again is None and self._next is State.HELD:
            self._wait()
        if self.again is not None and self.coordinator.connection is not None:
            self.coordinator.connection.close()

    def _begin(self) -> None:
        """Start the script, and meet the other ranks meanwhile."""
        child, world, rank = self.child, self.world, self.rank
        os.environ.clear()  # an earlier attempt has set variables
        os.environ.update({**rank.variables, **rank.orders.variables})
        problem: UserError | JobFailed | None = None
        try:
            prepare(world)
            if not rank.orders.image:  # which has the program
                rank.program.check()
            if world.rank == 0 and not child.is_command:
                sinks.require(os.environ)
            if not (child.is_command or child.runs):
                child.start(os.environ)
        except (UserError, JobFailed) as error:
            problem = error
        if rank.launcher is not None:
            self._connect(rank.launcher)
        if isinstance(problem, JobFailed):  # all ranks refuse a UserError together, in `meet`
            raise problem
        # Imported here, while the script's Python starts beside this process and takes longer.
        from mpiddp.runtime.rendezvous.meet import joining_timeout_s, meet

        try:
            met = meet(
                self.coordinator,
                str(problem or ""),
                rank.program.files,
                rank.program.title,
                apart=True,
            )
        finally:
            # All ranks have read the private file once they have met, or refuse together. Else the launcher does.
            if rank.private_file and isinstance(sys.exc_info()[1], (UserError, type(None))):
                from mpiddp.hosts import private

                private.remove(rank.private_file)
        # Adopt orphans from here on: the channel process, where no launcher serves, must not be ours.
        adopt_orphans()
        self._signals, self.state = caught_signals(), State.RUNNING
        ranks = self.coordinator
        env = {**met.variables, **variables_of_script(ranks, self._error_file)}
        env |= variables_of_open_mpi(ranks.world) if rank.orders.mpi_variables else {}
        os.environ.update(env)
        self._join(joining_timeout_s())
        self.store.take(met.sockets, ranks.world.world_size, is_needed=not child.is_command)
        if child.is_command:
            with ranks.all_or_none():
                child.start(os.environ)
            return
        child.go(rank, env, met.store_port)

    def _connect(self, launcher: Server) -> None:
        world = self.world
        self.coordinator.connect(world, launcher)
        self.coordinator.on_news = self._obey
        outputs = [stream.key for stream in self.child.outputs]
        self.coordinator.send("started", host=world.hostname, pid=os.getpid(), outputs=outputs)
        self.child.connect(launcher)
        if folder := os.environ.get(variables.LOG_DIR):
            self._keep_output(folder, "--log-dir")

    def _keep_output(self, folder: str, option: str = "") -> None:
        with errors.named_by(option):
            path = self.child.keep_output(Path(folder).absolute())
        self.coordinator.send("log", path=str(path))

    def _join(self, timeout_s: float) -> None:
        """Wait until the Pythons of all scripts have started, unless that of this rank has ended."""
        child, ranks = self.child, self.coordinator
        while child.runs and "ready" not in child.messages:
            self._wait()
        if child.status is not None:
            return
        ranks.send("joining", timeout_s=timeout_s, **({"script": child.pid} if child.pid else {}))
        ranks.give("joined", None, timeout_s=None if ranks.has_launcher else timeout_s, calls=False)
        while ranks.connection and child.status is None and not ranks.given("joined", timeout_s):
            self._wait()

    def _serve(self) -> bool:
        """Wait for all that may happen until the program has ended. Returns whether it ends on request."""
        child, ranks = self.child, self.coordinator
        if ranks.has_launcher and ranks.world.local_rank == 0:
            env = dict(os.environ)
            self._readings.enter_context(reading_gpus(ranks.ranks_here, env, ranks.send))
        while child.status is None:
            self._wait()
        ending = child.ending()
        if self._next is None and not (self._is_asked or ending.is_failure):
            self._readings.close()  # its tool would be taken for a process that the program has left
            child.name_what_is_left()
        self._tell_files()
        stops = self._report(ending)
        if self._next is not State.OVER:
            self._code = ending.code
        self._clear(_END_S)
        return stops

    def _clear(self, grace_s: float) -> None:
        """End the program with all that it has started, and read the rest of its output."""
        child = self.child
        child.end(grace_s)
        # Now, because a process that still has the streams may delay the end of this one.
        self._error_file.unlink(missing_ok=True)
        self._readings.close()
        while child.pid and not all(stream.is_done for stream in child.streams):
            self._wait()
            child.close_idle_outputs()

    def _tell_write(self) -> None:
        """Tell the launcher which file the script writes, if that takes long, or if the script has to end.

        So the launcher waits for it. A script's own `saving()` reaches the launcher without the agent.
        """
        child, ranks, path = self.child, self.coordinator, ""
        if not ranks.has_launcher or child.writes is None:
            return
        has_to_end = self._is_asked or self._ends_at or child.waiting
        write = child.writes.now if child.runs else None
        if write and (has_to_end or time.monotonic() > write.at + _LONG_WRITE_S):
            path = write.path or "a file"
        if path not in ("", self._told_write):
            ranks.send("saving", active=True, path=path)
        elif self._told_write and not (path or child.says_it_saves or "stopped" in child.messages):
            ranks.send("saving", active=False)
        self._told_write = path

    def _tell_files(self) -> None:
        """The script has ended. Tell the launcher which file it wrote last, and which one it has torn."""
        writes = self.child.writes
        if writes is None or not self.coordinator.has_launcher:
            return
        last, now = writes.last, writes.now
        if last or now:
            torn, path, step, age_s = now.path if now else "", "", 0, 0.0
            if last:
                path, step, age_s = last.path, last.step, time.monotonic() - last.at
            self.coordinator.send("wrote", path=path, step=step, age_s=age_s, torn=torn)

    def _wait(self) -> None:
        """Act on what happens next. Raises EndedFromOutside."""
        child, channel = self.child, self.coordinator
        connection = None if channel.is_lost else channel.connection
        poll = select.poll()
        for stream in child.streams:
            stream.register(poll)
        for file in (child.control, self._signals, connection):
            if file is not None:
                poll.register(file, select.POLLIN)
        has_to_end = self._ends_at or self._is_asked or child.waiting
        ready = dict(poll.poll(_WAIT_IN_GRACE_MS if has_to_end else _WAIT_MS))
        for stream in child.streams:
            if manners := stream.act(ready):
                channel.send("terminal", **manners._asdict())
        # Before `hear`, because a script writes its last message before it ends.
        reap(self.helpers)
        if self.store.has_failed:
            child.say("torch's store has ended, so no process group can form any more.")
        child.hear()
        while child.news:
            self._on_message(child.news.pop(0))
        if self.spare is not None and self.spare.status is not None:
            if child.status is None:
                child.forget_kills()  # the script has not caused its end
            self.spare.close()
            self.spare = None
        if connection is not None and connection.fileno() in ready:
            channel.receive()
        child.pass_on_waiting()
        self._tell_write()
        self._see_others()
        if self._signals is not None and self._signals in ready:
            for number in os.read(self._signals, 4096):
                if number != signal.SIGCHLD:
                    child.pass_on(number)

    def _on_message(self, facts: Mapping[str, Any]) -> None:
        """Act on a message of the script. `child.messages` keeps the latest of each type."""
        child, ranks = self.child, self.coordinator
        match facts["type"]:
            case "keep_output":
                with errors.aid("log file", child.say):
                    self._keep_output(facts["folder"])
            case "hidden" if child.outputs:
                child.outputs[-1].save(facts["text"].encode(errors="backslashreplace"))
            case "stopping":
                child.passed.add(facts["signal"])
                self._is_asked = True
            case "interrupt":
                child.pass_on(facts["signal"])
            case "saving":
                self._told_write = ""  # the launcher has it from the script
            case "unhandled" if self._is_asked and self.state is State.RUNNING:
                # Until a script calls `should_stop`, only a signal without a handler ends it.
                child.pass_on(signal.SIGTERM)
            case "claim":  # of a script without a connection of its own
                ranks.send("claim", key=CLAIM, like=facts["like"])
            case "store":
                with errors.aid("torch's store", child.say):
                    python = self.rank.python[0]
                    self.store.serve(python, facts["folders"], is_known=facts["is_known"])
            case "imported" if self.holds and (self.spare or facts["ahead"]["module"] == "torch"):
                # Without a spare, a restart takes longer.
                with errors.aid("hot spare", child.say):
                    if self.spare is None:
                        spare = Child(self.rank, self.helpers)
                        spare.start(os.environ)
                        self.spare = spare
                        self.helpers.pids.add(spare.pid)
                    if not self.spare.tell({"type": "ahead", **facts["ahead"]}, within_s=_SPARE_S):
                        self.spare.discard()  # somebody has stopped it
            case "mpi":  # no later process of this rank can start MPI
                self.holds = False

    def _obey(self, facts: Mapping[str, Any]) -> None:
        match facts:
            case {"type": "end", "code": int(code)}:
                self._cut(State.OVER, code)
            case {"type": "hold"} if not self.holds:
                self._cut(State.OVER)
            case {"type": "hold"} if self.state is State.MEETING:
                self._cut(State.HELD)
            case {"type": "hold"} if self.child.status is None:
                self._ends_at = time.monotonic() + GRACE_S
            case {"type": "again", "orders": str(orders)}:
                self.again = Orders.unpacked(orders)
            case {"type": "stop", "signal": int(number)}:
                if self._next is None and not self._is_asked:
                    self.child.pass_on(number)
                self.child.passed.add(number)
                self._is_asked = True
            case {"type": "size", "columns": int(columns), "rows": int(rows)}:
                self._resize(columns, rows)
            case {"type": "stacks"}:
                if (text := self.child.stack()) is not None:  # if not, the script itself answers
                    self.coordinator.send("stacks", text=text[-TEXT_LIMIT:])

    def _resize(self, columns: int, rows: int) -> None:
        """Give the script's terminals the launcher's new size, and tell the script as a terminal does."""
        self.rank = self.rank.resized(columns, rows)
        for child in (self.child, self.spare):
            for stream in child.streams if child else ():
                stream.resize(self.rank.orders.terminal)
        self.child.pass_on(signal.SIGWINCH)

    def _see_others(self) -> None:
        """End if the daemon of the MPI has ended, or a second after a hold or a failure elsewhere."""
        ranks, child, now = self.coordinator, self.child, time.monotonic()
        has_news = bool(self._ends_at or ranks.code_of_failure or ranks.is_lost)
        if has_news and child.messages.pop("lost_connection", {}):
            child.tell({"type": "lost_connection"})  # it explains the lost connection
        if (ranks.first_failure or not ranks.connection) and child.messages.pop("claim", {}):
            child.tell({"type": "claim", "first": ranks.first_failure or (True, "")})
        if self._next is State.OVER:
            return
        ranks.is_lost |= self._is_cut_off(now)
        if self.rank.daemon not in (None, os.getppid()):
            self._cut(State.OVER)
        elif ranks.code_of_failure or ranks.is_lost:
            self._ends_at = self._ends_at or now + GRACE_S
            if now >= self._ends_at:
                self._cut(State.OVER, ranks.code_of_end())
        elif self._ends_at and child.status is None:
            if "over" in child.messages:  # the script has failed too, and only its Python ends yet
                child.end(0.0)
            elif now >= self._ends_at:
                self._cut(State.HELD)

    def _is_cut_off(self, now: float) -> bool:
        """Whether the launcher's host is silent, and the script makes no steps.

        After an outage, TCP sends again within the time that the outage has lasted.
        """
        connection, lost_s = self.coordinator.connection, self.rank.orders.lost_s
        stepped_at = self.child.messages.get("progress", {}).get("at", 0.0)
        if connection is None or not self.coordinator.has_launcher or now - stepped_at <= lost_s:
            return False
        return silence_s(connection) > 2 * lost_s

    def _cut(self, state: State, code: int = FAILED) -> None:
        """Get into this state, HELD or OVER, with this code. Raises EndedFromOutside if the program runs."""
        if self._next is not State.OVER:
            self._next, self._code = state, code
        if self.state in (State.MEETING, State.RUNNING) and self.child.status is None:
            self.state = State.ENDING
            raise EndedFromOutside

    def _report(self, ending: Ending) -> bool:
        """Tell the launcher, or else the other ranks, how this rank ends. Returns whether on request."""
        if self._next is State.OVER:
            return False
        child, ranks = self.child, self.coordinator
        # An MPI sends SIGTERM too, when another rank has failed. A launcher says itself that it stops a job,
        # so its ranks look at that alone.
        is_asked = self._is_asked if ranks.has_launcher else None
        # If scripts within a command agree on a stop, its agent is not told.
        says_so = child.is_command or "stopped" in child.messages
        stops = ending.stops(child.passed, is_asked=is_asked, says_so=says_so)
        if stops or not ending.is_failure:
            if ending.code == STOPPED and "stopped" not in child.messages:
                ranks.send("stopped")
            # A script that ends by os._exit(0) in the middle of its work has not left.
            has_left = child.is_command or "left" in child.messages or ending.is_failure
            ranks.send("done" if has_left else "exited")
            return stops
        if ranks.has_launcher:
            passed = {"passed": True} if ending.signal in child.passed else {}
            ranks.send("failed", **ending.facts, **child.lack_of_memory, **passed)
        elif ranks.hostnames and ranks.claim_first_failure()[0]:
            line = ending.line(ranks.name(self.world.rank))
            if line and not (ending.is_refusal or ending.traceback):  # the script has printed those
                errors.print_error(line)
        if self.holds and not self._is_asked:
            self._next = State.HELD
        else:
            ranks.send("fail", code=ending.code)
        return False
