"""One attempt at a job, whose mpirun has started: react to events until nothing of it is left.

`Attempt._TABLE`, at the end, is the whole state machine. The loop waits for sockets, signals and timers, and
uses no CPU while idle. `mpiddp.launch.verdict` judges what has happened.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar

from mpiddp.launch import stdin
from mpiddp.launch.control import STOP_SIGNALS, ControlServer, SignalQueue
from mpiddp.launch.exchange import Exchange
from mpiddp.launch.mpirun import MpirunProcess
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.output import JobOutput
from mpiddp.launch.plan import LONGEST_NEWS
from mpiddp.launch.ranks import Ranks
from mpiddp.launch.status import job_facts, status_lines
from mpiddp.launch.verdict import History, Stop
from mpiddp.launch.watch import Watch, missing_sentence, places_sentence
from mpiddp.protocol.channel import encode
from mpiddp.protocol.server import Message, Peer
from mpiddp.protocol.variables import JOIN_TIMEOUT_S
from mpiddp.protocol.viewers import Console

# Time limits for:
START_TIMEOUT_S = 120.0  # the first rank to start; disk caches may be cold
STACKS_S, INTERRUPTED_S = 4.0, 1.0  # ranks to send their stacks, also after an interrupt
SPREAD_S = 3.0  # a failure to reach all ranks by itself
END_S = 2.0  # ranks to end after an "end" message
STOP_S = 5.0  # mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
EXIT_S = 10.0  # mpirun to end once no rank is left
SAVE_GRACE_S = 600.0  # ranks to stop, from the request on, while one of them saves
ORPHANS_S = 2.0  # mpirun's orphans to end by themselves
SILENCE_S = 1.0  # a host to acknowledge a message
OUTPUT_S = 5.0  # output that neither continues nor ends
# The last lines of a job, by who has requested its stop. A terminal may be stopped.
_LAST_OUTPUT_S = {
    Stop.NONE: float("inf"),
    Stop.TO_GROW: OUTPUT_S,
    Stop.BY_USER: OUTPUT_S,
    Stop.AT_ONCE: 0.5,
}

CHECK_S = 1.0  # between two looks at the ranks' steps, or at their saves
_LONGEST_WAIT_S = 86400.0  # epoll accepts at most a few weeks


class Phase(Enum):
    """What the ranks are doing. An attempt only moves on, never back."""

    STARTING = 0  # none has started
    JOINING = 1  # some have not joined the job
    RUNNING = 2  # all have joined. With `--grow` they may be asked to stop after their present step
    STOPPING = 3  # the user has asked them to stop, or to grow they have made their last step
    ENDING = 4  # they are being ended


class Event(Enum):
    """What the ranks, the user and the clock do."""

    STARTED = auto()  # a rank has started
    FIRST_JOINED = auto()
    ALL_JOINED = auto()
    LAST_STEP = auto()  # a rank has made its last step before a stop
    FAILED = auto()  # a rank has failed, or its connection has ended
    ALL_LEFT = auto()  # no rank is connected any more
    STOP = auto()  # the user's first request
    SECOND_STOP = auto()
    HOST_FOUND = auto()  # it can join the job
    STOP_AFTER = auto()  # --stop-after is over
    START_TIMEOUT = auto()
    JOIN_TIMEOUT = auto()
    JOIN_STACKS = auto()  # the stacks are there, for the report of the ranks that have not joined
    SEE_STEPS = auto()
    WATCH_STACKS = auto()  # the stacks are there, for the watch
    VIEW_STACKS = auto()  # the stacks are there, and only viewers have asked
    STACKS_LATE = auto()
    STACKS_OVER = auto()
    SEE_GRACE = auto()
    END_RANKS = auto()
    END_MPIRUN = auto()
    KILL = auto()


Action = Callable[["Attempt"], None] | None
__ = None


@dataclass(eq=False)
class Attempt:
    """An attempt whose mpirun has just started: its state, and its loop.

    stop_at: when --stop-after is over, in time.monotonic()'s seconds. exchange: of the function that every
    rank runs, if it is no script. search: begins the search for hosts that can join, with `--grow`.
    """

    options: LaunchOptions
    ranks: Ranks
    server: ControlServer
    mpirun: MpirunProcess
    output: JobOutput
    signals: SignalQueue
    console: Console = field(default_factory=Console)
    stop_at: float = float("inf")
    exchange: Exchange | None = None
    search: Callable[[], socket.socket] | None = None

    def __post_init__(self) -> None:
        self.history = History()
        self.watch = Watch(self.ranks, time.monotonic(), self.options.hang_timeout_s)
        self._timers = self.server.selector
        self._input: socket.socket | None = None  # of rank 0, which a thread writes
        self._phase = Phase.STARTING
        self._stop_reason = ""
        self._stopping_since = 0.0
        self._wanted: Event | None = None  # what the stacks are for that are on their way
        self._mute: set[int] = set()  # the ranks that have not answered the request for them
        self._viewers: list[Peer] = []  # that wait for stacks
        self._news: socket.socket | None = None  # of the search
        self._found = ""  # a host that can join, and how
        self._said: set[str] = set()
        self._join_timeout_s = self._join_by = 0.0
        self._start_timeout_s = max(START_TIMEOUT_S, 2 * (self.options.timeout_s or 0))
        self._timers.after(self.stop_at - time.monotonic(), Event.STOP_AFTER)
        if not self.mpirun.starter.kind.has_scheduler:  # srun may wait for other job steps to end
            self._timers.after(self._start_timeout_s, Event.START_TIMEOUT)

    # --- the loop ---

    def run(self) -> bool:
        """Wait and act until no process of the job is left here, and all its output is copied.

        Returns:
            Whether it is. A terminal may be stopped, and a second signal then ends the wait.
        """
        source: Any
        for source in (self.signals, self.console.listener):
            if source is not None:
                self._timers.register(source, selectors.EVENT_READ, source)
        while self.mpirun.code is None:
            self._wait()
        if self.server.has_ranks:
            self._receive_last_messages()
        grace_s = 0.0 if self.history.stop is Stop.AT_ONCE else ORPHANS_S
        if left := ", ".join(map(str, self.mpirun.end_orphans(grace_s))):
            blocked = f"processes {left} cannot be killed: they are blocked in the kernel."
            self._log(blocked, is_error=True)
        is_all_shown = self._receive_last_output()
        self.mpirun.reap_adopted()
        if self._news is not None:
            self._news.close()
        if self._input is not None:
            with suppress(OSError):  # it has ended
                self._input.shutdown(socket.SHUT_RDWR)
        return is_all_shown

    def _wait(self, at_most_s: float = _LONGEST_WAIT_S) -> None:
        """Wait for sockets, signals and timers, at most `at_most_s`, and handle what has happened."""
        until = min(self._timers.next_at, self.server.next_deadline)
        wait_s = min(at_most_s, max(0.0, until - time.monotonic()))
        ready = [key.data for key, _ in self._timers.select(wait_s)]
        for data in ready:
            if self._news and data is self._news:
                if found := self._news.recv(LONGEST_NEWS).decode():
                    self._found = found
                    self.on(Event.HOST_FOUND)
                else:  # an error has ended the search
                    self._timers.unregister(self._news)
            elif data is not self.signals:
                for message in self.server.receive(data):
                    self.on_message(message)
        self.server.expire()
        # After the messages, which the signal's sender may have reacted to.
        for number in self.signals.receive() if self.signals in ready else ():
            if number in STOP_SIGNALS:
                self.on_signal(number)
            else:
                self.mpirun.reap_adopted()
        for event in self._timers.due():
            self.on(event)

    def _receive_last_messages(self) -> None:
        """Receive the messages that are still in transit, and drop the hosts that do not acknowledge."""
        deadline = time.monotonic() + SILENCE_S
        self._end_ranks()
        while self.server.has_ranks and time.monotonic() < deadline:
            self._wait(max(0.0, deadline - time.monotonic()))
        for message in self.server.drop_silent_hosts():
            self.ranks.note(message)

    def _receive_last_output(self) -> bool:
        """Copy the rest of the output. Whether all has been copied.

        A second signal ends the wait for a terminal that is stopped, and so does a stop after some time.
        """
        self._timers.cancel(*(set(Event) - {Event.STOP_AFTER}))
        began_at = time.monotonic()
        while (late := self._late_output()) and self._may_wait_since(began_at):
            if self.output.idle_s > OUTPUT_S:
                missing = f"the last output of {late} has not arrived; it may be missing here."
                self._log(missing, is_error=True)
                break
            self._wait(0.02)
        if late:
            self.mpirun.kill_agents()
        self.output.finish()
        while not (is_finished := self.output.is_finished(0.05)) and self._may_wait_since(began_at):
            self._wait(0.05)
        return is_finished

    def _may_wait_since(self, began_at: float) -> bool:
        return time.monotonic() <= began_at + _LAST_OUTPUT_S[self.history.stop]

    def _late_output(self) -> str:
        """The ranks whose output has not ended, but for those on silent hosts or that do not end."""
        left_out, silent = self.server.connected, self.ranks.silent_hosts
        late = [
            rank
            for rank in self.output.open_ranks
            if rank not in left_out and self.ranks.hosts[rank] not in silent
        ]
        if late:
            return self.ranks.names(late)
        return "a rank" if self.mpirun.agents() else ""

    # --- events ---

    def on(self, event: Event) -> None:
        """React to an event as `_TABLE` says."""
        if action := self._TABLE[event][self._phase.value]:
            action(self)
        if self._phase.value > Phase.RUNNING.value:
            self.output.begin_end()

    def on_signal(self, number: int) -> None:
        if self.history.stop < Stop.BY_USER:
            self.request_stop(signal.Signals(number).name)
        elif number != signal.SIGHUP:  # a closing terminal may send two
            self.on(Event.SECOND_STOP)

    def request_stop(self, reason: str) -> None:
        """The user requests a stop, unless this has happened before."""
        if self.history.stop < Stop.BY_USER:
            self.history.stop, self._stop_reason = Stop.BY_USER, reason
            # A request after a failure explains nothing.
            self.history.is_requested = self._phase is not Phase.ENDING
            self.on(Event.STOP)

    def on_message(self, message: Message) -> None:
        """React to a message of a rank, or of a viewer."""
        ranks, facts = self.ranks, message.facts
        ranks.note(message)
        match message.kind:
            case "output":
                self.output.add(rank=message.rank, **facts)
            case "input":
                self._input = facts["connection"]
                stdin.begin(facts["connection"])
            case "function" | "answer" if self.exchange is not None:
                self.exchange.take(message, self.server)
            case "view_job":
                now, latest = time.monotonic(), self.output.latest.copy()
                more = {"phase": self._phase.name.lower(), "straggler": self.watch.straggler}
                self._answer([facts["viewer"]], {**job_facts(ranks, latest, now), **more})
            case "view_stacks":
                self._viewers.append(facts["viewer"])
                self._collect(Event.VIEW_STACKS)
            case "full":
                self._end_job(
                    f"ranks cannot connect: {facts['error']}. A job needs three open files for each rank "
                    "(ulimit -n)."
                )
            case "started":
                self.on(Event.STARTED)
                if self.history.stop is Stop.BY_USER:
                    self.server.request_stop(message.rank)
            case "mpi_init" if not ranks.joining and len(ranks.in_mpi_init) <= 1:
                own_s = self.options.timeout_s or JOIN_TIMEOUT_S
                # "active": MPI waits for all ranks.
                self._join_timeout_s = own_s if facts["active"] else self._start_timeout_s
                self.on(Event.FIRST_JOINED)
            case "joining":
                self._join_timeout_s = facts["timeout_s"]
                if len(ranks.joining) == 1:
                    self.on(Event.FIRST_JOINED)
                if len(ranks.joining) == ranks.world_size:
                    self.on(Event.ALL_JOINED)
            case "stopped":
                self.on(Event.LAST_STEP)
            case "failed" | "lost" if message.rank in ranks.failures:
                self.on(Event.FAILED)
        # Of a script, only an early exit is the rank's end.
        ends = ("stacks", "exited") if message.from_script else ("stacks", "exited", "done", "lost")
        if message.kind in ends:
            self._mute.discard(message.rank)
            if self._wanted is not None and not self._mute:
                self._report_stacks()
        if ranks.done and not self.server.has_ranks:
            self.on(Event.ALL_LEFT)

    def _log(self, sentence: str, *, is_error: bool = False) -> None:
        """Print a sentence, at most once in an attempt."""
        if sentence not in self._said:
            self._said.add(sentence)
            self.output.log(sentence, is_error=is_error)

    # --- stacks: one collection at a time ---

    def _collect(self, event: Event) -> None:
        """Let `event` happen when every rank has sent its stacks, or the time is over.

        Viewers wait for any collection, and each phase has one other event.
        """
        if self._wanted is not None:
            self._wanted = self._wanted if event is Event.VIEW_STACKS else event
            return
        self._wanted = event
        self.ranks.stacks.clear()
        self._mute = self.server.request_stacks() - self.ranks.done.keys()
        self._timers.after(STACKS_S, Event.STACKS_LATE)
        self._timers.after(STACKS_S + INTERRUPTED_S if self._mute else 0.0, Event.STACKS_OVER)

    def _interrupt(self) -> None:
        """Interrupt ranks that do not answer, if their stacks are for an error line: one may only be slow."""
        is_guess = self._wanted is Event.WATCH_STACKS and self.options.hang_timeout_s is None
        if not is_guess and self._wanted is not Event.VIEW_STACKS:
            for rank in self._mute:
                self.server.send(rank, "stacks")  # its agent interrupts the script

    def _report_stacks(self) -> None:
        self._timers.cancel(Event.STACKS_LATE, Event.STACKS_OVER)
        event, self._wanted = self._wanted, None
        viewers, self._viewers = self._viewers, []
        stacks = {rank: facts["text"] for rank, facts in self.ranks.stacks.items()}
        self._answer(viewers, {"sentence": places_sentence(self.ranks), "stacks": stacks})
        if event is not None:
            self.on(event)

    def _answer(self, viewers: Sequence[Peer], facts: Mapping[str, Any]) -> None:
        for viewer in viewers:
            if viewer.is_open:
                viewer.send(encode("answer", **self.console.facts, **facts))

    # --- starting, joining ---

    def _join(self) -> None:
        """All ranks may import torch from a file system that is away, or is only slow."""
        self._phase = Phase.JOINING
        self._join_timeout_s = self._start_timeout_s
        self._await_rest()

    def _end_unstarted(self) -> None:
        """mpirun hangs, and no other limit would end it."""
        self._end_job(
            f"no rank has started in {self._start_timeout_s:g} s: mpirun or one of its ssh logins "
            "hangs. If a start takes that long, raise --timeout."
        )

    def _await_rest(self) -> None:
        self._join_by = time.monotonic() + self._join_timeout_s
        self._timers.after(self._join_timeout_s, Event.JOIN_TIMEOUT)

    def _ask_stacks_of_missing(self) -> None:
        self._collect(Event.JOIN_STACKS)

    def _report_missing(self) -> None:
        """Name the ranks that have not joined. If others wait for them, that ends the job."""
        if time.monotonic() < self._join_by:  # the first one has joined since
            return
        sentence = missing_sentence(self.ranks, self._join_timeout_s)
        if self.ranks.joining or self.ranks.in_mpi_init:
            self._end_job(sentence)
        else:
            self._log(sentence)

    def _run_on(self) -> None:
        self._phase = Phase.RUNNING
        self._see_steps()
        if self.search is not None:
            self._news = self.search()
            self._timers.register(self._news, selectors.EVENT_READ, self._news)

    # --- running ---

    def _see_steps(self) -> None:
        """Look at the running job, and at its stacks if the watch wants them."""
        if self.ranks.all_done:
            return
        now, watch = time.monotonic(), self.watch
        if sentence := watch.judge_steps(now):
            self._log(sentence)
        if watch.wants_stacks(now, self.output.idle_s):
            self._collect(Event.WATCH_STACKS)
        if self.output.shows_status:
            attempt = self.console.attempts
            self.output.show_status(status_lines(self.ranks, attempt, watch.straggler, now))
        self._timers.after(min(CHECK_S, self.options.hang_timeout_s or CHECK_S), Event.SEE_STEPS)

    def _judge_stacks(self) -> None:
        """Say who hangs. With --hang-timeout, that ends the job."""
        if self.ranks.all_done:
            return
        for sentence in (sentences := self.watch.judge_stacks(time.monotonic())):
            self._log(sentence, is_error=True)
        if sentences and self.options.hang_timeout_s is not None:
            self._end_job("the job hung and was stopped.")

    def _grow(self) -> None:
        """Stop all ranks after their present steps, however long these take, unless work would be lost."""
        most = self.ranks.announcement.max_ranks
        is_full = most is not None and self.ranks.world_size >= most
        if self.history.stop or self.ranks.done or is_full:
            return
        if why_not := self.ranks.why_not_resumable:
            self._log(f"{self._found}, but {why_not}, so the job continues without a restart.")
            return
        self._log(f"{self._found}: stopping to restart.")
        self.history.stop = Stop.TO_GROW
        self._ask_to_stop()

    # --- stopping, saving ---

    def _ask_all(self) -> None:
        """The user's first request: stop all ranks, within the time limits."""
        if not self.server.has_ranks:
            self._end_mpirun()
            return
        self._ask_to_stop()
        self._begin_grace()
        self._phase = Phase.STOPPING
        if self.ranks.supports_stop:
            self._log(
                f"{self._stop_reason}: the ranks are saving and stopping; another signal kills them at once."
            )

    def _stop_after(self) -> None:
        self.request_stop("--stop-after")

    def _ask_to_stop(self) -> None:
        for rank in self.server.connected:
            self.server.request_stop(rank)

    def _begin_grace(self) -> None:
        self._stopping_since = time.monotonic()
        self._timers.after(min(CHECK_S, self.options.grace_s), Event.SEE_GRACE)

    def _save_to_grow(self) -> None:
        """A rank has made its last step, and the others are in the same one."""
        if self.history.stop is Stop.TO_GROW:
            self._begin_grace()
            self._phase = Phase.STOPPING

    def _see_grace(self) -> None:
        """End the ranks that have not stopped in time. A rank that saves has longer."""
        grace_s, now, ranks = self.options.grace_s, time.monotonic(), self.ranks
        since_stop = now - self._stopping_since
        left_s = grace_s - (now - max(ranks.last_saved_at, self._stopping_since))
        saving = sorted(ranks.saving)
        if saving and since_stop >= grace_s:
            left_s = SAVE_GRACE_S - since_stop
            if self._stop_reason not in self._said:  # who saves may change, and is said once
                self._said.add(self._stop_reason)
                self._log(
                    f"{ranks.names(saving)} {'is' if len(saving) == 1 else 'are'} still saving; "
                    f"waiting for at most {SAVE_GRACE_S:g} s."
                )
        if self.output.blocked_s >= OUTPUT_S:  # as by `| less`: ranks that print would never end
            self.output.give_up()
        if left_s > 0:
            self._timers.after(min(CHECK_S, left_s), Event.SEE_GRACE)
        elif ranks.all_done:  # only their output is left
            self.output.give_up()
        else:
            self.history.limit = ranks.late_clause(SAVE_GRACE_S if saving else grace_s)
            if self.history.stop is Stop.BY_USER:
                self._end_mpirun()
            else:
                self._end_job(f"{self.history.limit}.")

    # --- ending ---

    def _fail(self) -> None:
        """Give a failure time: most starters end the other ranks, and the ranks' own watch always does.

        Only this process notices a host that has stopped answering.
        """
        self.history.failed_in_stop = self.history.stop is Stop.BY_USER
        self._phase = Phase.ENDING
        spread_s = 0.0 if self.ranks.silent_hosts else SPREAD_S
        self._timers.after(spread_s, Event.END_RANKS)
        self._timers.after(spread_s + 1.0, Event.END_MPIRUN)

    def _await_exit(self) -> None:
        self._timers.after(EXIT_S, Event.END_MPIRUN)

    def _end_job(self, reason: str) -> None:
        self.history.ended_because = reason
        self._phase = Phase.ENDING
        self._end_ranks()
        self._timers.after(END_S, Event.END_MPIRUN)

    def _end_ranks(self) -> None:
        self.server.send_all("end", code=1)

    def _end_mpirun(self) -> None:
        self._phase = Phase.ENDING
        self._timers.cancel(Event.END_MPIRUN)
        self.mpirun.stop()
        # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
        self._timers.after(STOP_S, Event.KILL)

    def _kill(self) -> None:
        self.mpirun.kill_all()

    def _kill_now(self) -> None:
        self.history.stop = Stop.AT_ONCE
        self._phase = Phase.ENDING
        self._kill()

    # What each event does in each phase, and "__" for nothing.
    # fmt: off
    _TABLE: ClassVar[dict[Event, tuple[Action, ...]]] = {
        #                     STARTING     JOINING      RUNNING      STOPPING     ENDING
        Event.STARTED:       (_join,       __,          __,          __,          __),
        Event.FIRST_JOINED:  (__,          _await_rest, __,          __,          __),
        Event.ALL_JOINED:    (__,          _run_on,     __,          __,          __),
        Event.HOST_FOUND:    (__,          __,          _grow,       __,          __),
        Event.STOP:          (_ask_all,    _ask_all,    _ask_all,    _ask_all,    __),
        Event.LAST_STEP:     (__,          __,          _save_to_grow, __,        __),
        Event.ALL_LEFT:      (_await_exit, _await_exit, _await_exit, _await_exit, __),
        Event.FAILED:        (_fail,       _fail,       _fail,       _fail,       __),
        Event.SECOND_STOP:   (_kill_now,) * len(Phase),
        # Timers, and what the stacks that one of them has requested are for:
        Event.STOP_AFTER:    (_stop_after,) * len(Phase),
        Event.START_TIMEOUT: (_end_unstarted, __,       __,          __,          __),
        Event.JOIN_TIMEOUT:  (__,          _ask_stacks_of_missing, __, __,        __),
        Event.JOIN_STACKS:   (__,          _report_missing, __,      __,          __),
        Event.SEE_STEPS:     (__,          __,          _see_steps,  __,          __),
        Event.WATCH_STACKS:  (__,          __,          _judge_stacks, __,        __),
        Event.VIEW_STACKS:   (__,) * len(Phase),
        Event.STACKS_LATE:   (_interrupt,  _interrupt,  _interrupt,  __,          __),
        Event.STACKS_OVER:   (_report_stacks,) * len(Phase),
        Event.SEE_GRACE:     (__,          __,          __,          _see_grace,  __),
        Event.END_RANKS:     (__,          __,          __,          __,          _end_ranks),
        Event.END_MPIRUN:    (_end_mpirun,) * len(Phase),
        Event.KILL:          (__,          __,          __,          __,          _kill),
    }
    # fmt: on
