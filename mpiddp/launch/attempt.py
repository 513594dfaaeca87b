"""One attempt at a job, whose mpirun has started: react to events until nothing of it is left.

`Event`, at the end, says what each event does in each phase. The loop waits for sockets, signals and timers,
and uses no CPU while idle. `mpiddp.launch.verdict` judges what has happened.
"""

from __future__ import annotations

import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique
from functools import partial
from typing import Any

from mpiddp.hosts.processes import end_all, signal_all
from mpiddp.launch.control import Console, ControlServer, Exchange, SignalQueue
from mpiddp.launch.mpirun import MpirunProcess
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.output import JobOutput
from mpiddp.launch.ranks import Announcement, Ranks, job_facts, status_lines
from mpiddp.launch.verdict import HUNG_UP, History, Stop
from mpiddp.launch.watch import Stacks, Watch, missing_sentence
from mpiddp.protocol.server import Message
from mpiddp.protocol.terminal import Manners
from mpiddp.protocol.variables import JOIN_TIMEOUT_S

# Time limits for:
START_TIMEOUT_S = (
    120.0  # the first rank to start, and once all have, the first to join; disk caches may be cold
)
PROBE_S = 10.0  # ranks to start, before their hosts are asked whether they are still there
SPREAD_S = 3.0  # a failure to reach all ranks by itself
END_S, FAILED_END_S = 2.0, 1.0  # ranks to end after an "end" message; after the failure of one
STOP_S = 5.0  # mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
EXIT_S = 10.0  # mpirun to end once no rank is left
SAVE_GRACE_S = 600.0  # ranks to stop, from the request on, while one of them saves
ORPHANS_S = 2.0  # mpirun's orphans to end by themselves
SILENCE_S = 1.0  # a host to acknowledge a message
OUTPUT_S = 5.0  # output that neither continues nor ends; the last lines after a request to stop
AT_ONCE_S = 0.5  # the last lines after a second signal
CHECK_S = 1.0  # the next check of the ranks' steps, or of their saves


class Phase(IntEnum):
    """What the ranks are doing. An attempt only moves on, never back."""

    STARTING = 0  # some have not joined the job
    RUNNING = 1  # all have joined. With `--grow` they may be asked to stop after their present step
    STOPPING = 2  # the user has asked them to stop, or to grow they have made their last step
    ENDING = 3  # they are being ended


@dataclass(eq=False)
class Attempt:
    """An attempt whose mpirun has just started: its state, and its loop."""

    options: LaunchOptions
    ranks: Ranks
    server: ControlServer
    mpirun: MpirunProcess
    output: JobOutput
    signals: SignalQueue
    console: Console = field(default_factory=Console)
    stop_at: float = float("inf")  # when --stop-after is over, in time.monotonic()'s seconds
    exchange: Exchange | None = None  # of the function that every rank runs, if it is no script
    search: Callable[[], list[str]] | None = None  # for hosts that can join, with --grow
    probe: Callable[[set[str]], list[str]] | None = None  # which of these hosts are gone, and why

    def __post_init__(self) -> None:
        self.history = History()
        self.watch = Watch(self.ranks, time.monotonic(), self.options.hang_timeout_s)
        self._timers = self.server.selector
        self._phase = Phase.STARTING
        self._stop_signal, self._stopping_since = int(signal.SIGTERM), 0.0
        self._stacks = Stacks(self.ranks, self.server, self.console)
        self._found: list[str] = []  # by the search
        self._gone: list[str] = []  # by the probe
        self._has_ended = threading.Event()
        # All ranks may import torch from a slow file system.
        self._start_timeout_s = max(START_TIMEOUT_S, 2 * (self.options.timeout_s or 0))
        self._timers.after(self.stop_at - time.monotonic(), self.request_stop)
        if self.probe is not None:
            threading.Thread(target=self._probe, daemon=True).start()
            self._see_start()
        if not self.mpirun.starter.has_scheduler:  # srun may wait for other job steps to end
            self._allow(self._start_timeout_s)

    # --- the loop ---

    def run(self) -> bool:
        """Wait and act until no process of the job is left here. Whether all its output is copied."""
        self._timers.register(self.signals, selectors.EVENT_READ, self.signals)
        if (viewers := self.console.listener) is not None:
            self._timers.register(viewers, selectors.EVENT_READ, viewers)
        while self.mpirun.code is None:
            self._wait()
        if self.mpirun.code and self._phase is Phase.STARTING:  # its ssh may have found a host gone
            self.history.ended_because = "\n".join(self._probe_late())
        self._end_ranks()  # whose last messages may be in transit
        deadline = time.monotonic() + SILENCE_S
        while self.server.connected and time.monotonic() < deadline:
            self._wait(deadline)
        for message in self.server.drop_silent_hosts():
            self.ranks.note(message)
        grace_s = 0.0 if self.history.stop is Stop.AT_ONCE else ORPHANS_S
        if left := ", ".join(map(str, end_all(self.mpirun.left, grace_s=grace_s))):
            blocked = "cannot be killed: they are blocked in the kernel."
            self.output.log(f"processes {left} {blocked}", is_error=True)
        is_all_shown = self._receive_last_output()
        self._has_ended.set()
        return is_all_shown

    def _wait(self, until: float = float("inf")) -> None:
        """Wait for sockets, signals and timers, at most until then, and handle what has happened."""
        ready = self._timers.ready(until)
        for data in ready:
            for message in self.server.receive(data) if data is not self.signals else ():
                self.on_message(message)
        # After the messages, which the signal's sender may have reacted to.
        for number in self.signals.receive() if self.signals in ready else ():
            self.on_signal(number)
        if self.signals.has_resized:
            self.signals.has_resized = False
            if (terminal := self.options.terminal).files:
                self.server.send_all("size", columns=terminal.columns, rows=terminal.rows)
        for event in self._timers.due():
            event() if callable(event) else self.on(event)

    def _receive_last_output(self) -> bool:
        """Copy the rest of the output. Whether all has been copied."""
        self._timers.cancel(*self._timers.timers.keys() - {self.request_stop})
        began_at = time.monotonic()
        while (late := self._late_output()) and self._may_wait_since(began_at):
            if time.monotonic() - self.output.copied_at > OUTPUT_S:
                missing = f"the last output of {late} has not arrived; it may be missing here."
                self.output.log(missing, is_error=True)
                break
            self._wait(time.monotonic() + 0.02)
        if late:
            signal_all(partial(self.mpirun.left, agents=True), signal.SIGKILL)
        while not (is_finished := self.output.finish(0.05)) and self._may_wait_since(began_at):
            self._wait(time.monotonic() + 0.05)
        return is_finished

    def _may_wait_since(self, began_at: float) -> bool:
        """Whether a terminal that is stopped may delay the end. A second signal ends the wait."""
        limit_s = AT_ONCE_S if self.history.stop is Stop.AT_ONCE else OUTPUT_S
        return self.history.stop is Stop.NONE or time.monotonic() <= began_at + limit_s

    def _late_output(self) -> str:
        """The ranks whose output has not ended, but for those on silent hosts or that do not end."""
        connected, silent = self.server.connected, self.ranks.silent_hosts
        late = [rank for rank in self.output.open_ranks if rank not in connected]
        if late := [rank for rank in late if self.ranks.hosts[rank] not in silent]:
            return self.ranks.names(late)
        return "a rank" if self.mpirun.left(agents=True) else ""

    # --- what happens ---

    def _enter(self, phase: Phase) -> None:
        """The next phase, for which what was asked of the stacks before no longer counts."""
        self._phase, self._stacks.then = phase, None  # a script that saves is not interrupted
        self.output.hold_mpirun()

    def on(self, event: Event) -> None:
        """React to an event as `Event` says."""
        if action := event.actions[self._phase]:
            action(self)

    def on_signal(self, number: int) -> None:
        if self.history.stop < Stop.BY_USER:
            is_hung_up = number == signal.SIGHUP
            self.request_stop(HUNG_UP if is_hung_up else signal.Signals(number).name, number)
        elif number != signal.SIGHUP:  # a closing terminal may send two
            self.on(Event.SECOND_STOP)

    def request_stop(self, reason: str = "--stop-after", number: int = signal.SIGTERM) -> None:
        """The user requests a stop, unless this has happened before."""
        if self.history.stop < Stop.BY_USER:
            self.history.stop, self.history.stop_reason = Stop.BY_USER, reason
            self._stop_signal = number
            # A request after a failure explains nothing.
            self.history.is_requested = self._phase is not Phase.ENDING
            self.on(Event.STOP)

    def on_message(self, message: Message) -> None:
        """React to a message of a rank, or of a viewer."""
        ranks, facts, joining = self.ranks, message.facts, self.ranks.said["joining"]
        ranks.note(message)
        match message.kind:
            case "output":
                self.output.add(rank=message.rank, **facts)
            case "input" if self.options.stdin == "none":
                facts["connection"].close()
            case "input":
                self.output.send_stdin(facts["connection"])
            case "function" | "answer" if self.exchange is not None:
                self.exchange.take(message, self.server)
            case "view_job":
                state = job_facts(ranks, self.output.latest.copy(), time.monotonic())
                more = {"phase": self._phase.name.lower(), "straggler": self.watch.straggler}
                self.console.answer(facts["viewer"], **state, **more)
            case "full":
                needs = "A job needs three open files for each rank (ulimit -n)."
                self._end_job(f"ranks cannot connect: {facts['error']}. {needs}")
            case "started":
                if len(ranks.said["started"]) == 1:  # the others are waited for
                    self._allow(self.options.timeout_s or JOIN_TIMEOUT_S)
                if len(ranks.said["started"]) == ranks.world_size:
                    self._allow(self._start_timeout_s)
                if self.history.stop is Stop.BY_USER:
                    self.server.request_stop(self._stop_signal, message.rank)
            case "joining":
                if len(joining) == 1:
                    self._allow(facts["timeout_s"])
                if len(joining) == ranks.world_size:
                    self.on(Event.ALL_JOINED)
            case "terminal" if message.rank == 0:
                self.output.follow(Manners(facts["echo"], facts["lines"]))
            case "stopped" if self.history.stop is Stop.TO_GROW:
                self.on(Event.LAST_STEP)
            case "failed" | "lost" if message.rank in ranks.failures:
                self.on(Event.FAILED)
        self._stacks.note(message)
        if ranks.done and not self.server.connected and self._phase is not Phase.ENDING:
            self._timers.after(EXIT_S, self._end_mpirun)

    def _allow(self, limit_s: float) -> None:
        """Give the ranks so long to join, or the first one to start. What an earlier limit asked is over."""
        self._limit_s, self._stacks.then = limit_s, None
        self._timers.after(limit_s, Event.LATE)

    def _probe(self) -> None:
        """In a thread, ask the hosts whose ranks have not started: an mpirun waits minutes for them."""
        while self._phase is Phase.STARTING and not self._has_ended.wait(PROBE_S):
            self._gone += self._probe_late()

    def _probe_late(self) -> list[str]:
        """A sentence for each host that is gone, of those whose ranks have not started."""
        started = self.ranks.said["started"]
        late = {host for rank, host in enumerate(self.ranks.hosts) if rank not in started}
        return self.probe(late) if self.probe and late else []

    def _see_start(self) -> None:
        if self._phase is Phase.STARTING and self._gone:
            self._end_job("\n".join(self._gone))
        elif self._phase is Phase.STARTING:
            self._timers.after(CHECK_S, self._see_start)

    def _ask_missing(self) -> None:
        if self.ranks.said["started"]:
            self._stacks.collect(self._report_missing, interrupts=True)
        else:  # no other limit would end an mpirun that hangs
            why = "mpirun or one of its ssh logins hangs. If a start takes that long, raise --timeout."
            self._end_job(f"no rank has started in {self._limit_s:g} s: {why}")

    def _report_missing(self) -> None:
        """Name the ranks that have not joined. If others wait for them, that ends the job."""
        sentence = missing_sentence(self.ranks, self._limit_s)
        said = self.ranks.said
        if said["joining"] or len(said["started"]) < self.ranks.world_size:
            self._end_job(sentence)
        else:
            self.output.log(sentence)

    def _run_on(self) -> None:
        self._enter(Phase.RUNNING)
        self._see_steps()
        if self.search is not None:
            threading.Thread(target=self._search, args=(self.search,), daemon=True).start()

    def _search(self, search: Callable[[], list[str]]) -> None:
        """Search every `--grow`, in a thread: files, names and logins to hosts may hang."""
        while not self._has_ended.wait(self.options.grow_s):
            self._found.extend(search())

    def _see_steps(self) -> None:
        """Look at the running job, and at its stacks if the watch wants them."""
        if not self.ranks.left:
            return
        if self._found:
            self._grow(self._found.pop())
        now, watch = time.monotonic(), self.watch
        if sentence := watch.judge_steps(now):
            self.output.log(sentence)
        if watch.wants_stacks(now, self.output.copied_at):
            # A guess interrupts nothing: a rank may only be slow.
            self._stacks.collect(self._judge_stacks, interrupts=bool(self.options.hang_timeout_s))
        if self.output.shows_status:
            attempt = self.console.attempts
            self.output.show_status(status_lines(self.ranks, attempt, watch.straggler, now))
        self._timers.after(min(CHECK_S, self.options.hang_timeout_s or CHECK_S), Event.SEE_STEPS)

    def _judge_stacks(self) -> None:
        """Say who hangs. With --hang-timeout, that ends the job."""
        sentences = self.watch.judge_stacks(time.monotonic(), self.output.copied_at)
        for sentence in sentences:
            self.output.log(sentence, is_error=True)
        if sentences and self.options.hang_timeout_s is not None:
            self._end_job("the job hung and was stopped.")

    def _grow(self, found: str) -> None:
        """Stop all ranks after their present steps, however long these take, unless work would be lost."""
        ranks, announced, why_not = self.ranks, self.ranks.announcement, ""
        most = announced.max_ranks or ranks.world_size + 1
        if self.history.stop or ranks.done or ranks.world_size >= most:
            return
        if len(ranks.said["supports_stop"]) < ranks.world_size:
            why_not = "not every rank has called mpiddp.should_stop()"
        elif announced == Announcement():
            why_not = "the script has announced nothing that resumes it (mpiddp.announce)"
        if why_not:
            self.output.log(f"{found}, but {why_not}, so the job continues without a restart.")
        else:
            self.output.log(f"{found}: stopping to restart.")
            self.history.stop = Stop.TO_GROW
            self.server.request_stop(self._stop_signal, *self.server.connected)

    # --- stopping, saving, ending ---

    def _ask_all(self) -> None:
        """The user's first request: stop all ranks, within the time limits."""
        if not self.server.connected:
            self._end_mpirun()
            return
        self.server.request_stop(self._stop_signal, *self.server.connected)
        self._begin_grace()
        if self.ranks.said["supports_stop"]:
            stopping = "the ranks are saving and stopping; another signal kills them at once."
            self.output.log(f"{self.history.stop_reason}: {stopping}")

    def _begin_grace(self) -> None:
        """From now on, a time limit counts. Growth has none before a rank has made its last step."""
        self._enter(Phase.STOPPING)
        self._stopping_since = time.monotonic()
        self._timers.after(min(CHECK_S, self.options.grace_s), Event.SEE_GRACE)

    def _see_grace(self) -> None:
        """End the ranks that have not stopped in time. A rank that saves has longer."""
        limit_s, ranks, since = self.options.grace_s, self.ranks, self._stopping_since
        left_s = max(ranks.last_saved_at, since) + limit_s - time.monotonic()
        if ranks.saving and time.monotonic() >= since + limit_s:
            limit_s, left_s = SAVE_GRACE_S, since + SAVE_GRACE_S - time.monotonic()
            are = "is" if len(ranks.saving) == 1 else "are"
            waiting = f"{are} still saving; waiting for at most {limit_s:g} s."
            self.output.log(f"{ranks.names(sorted(ranks.saving))} {waiting}", about="who saves")
        if self.output.blocked_s >= OUTPUT_S:  # as by `| less`: ranks that print would never end
            self.output.give_up()
        if left_s > 0:
            self._timers.after(min(CHECK_S, left_s), Event.SEE_GRACE)
        elif not ranks.left:  # only their output is left
            self.output.give_up()
        else:
            self.history.limit = ranks.late_clause(limit_s)
            if self.history.stop is Stop.BY_USER:
                self._end_mpirun()
            else:
                self._end_job(f"{self.history.limit}.")

    def _fail(self) -> None:
        """Give a failure time: most starters end the other ranks, and the ranks' own watch always does."""
        self.history.failed_in_stop = self.history.stop is Stop.BY_USER
        # Only this process notices a host that has stopped answering.
        self._end_after(0.0 if self.ranks.silent_hosts else SPREAD_S, FAILED_END_S)

    def _end_job(self, reason: str) -> None:
        self.history.ended_because = reason
        self._end_after(0.0, END_S)

    def _end_after(self, seconds: float, end_s: float) -> None:
        self._enter(Phase.ENDING)
        self._timers.after(seconds, self._end_ranks)
        self._timers.after(seconds + end_s, self._end_mpirun)

    def _end_ranks(self) -> None:
        self.server.send_all("end", code=1)

    def _end_mpirun(self) -> None:
        self._enter(Phase.ENDING)
        self._timers.cancel(self._end_mpirun)
        self.mpirun.stop()
        # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
        self._timers.after(STOP_S, self.mpirun.kill_all)

    def _kill_now(self) -> None:
        self.history.stop = Stop.AT_ONCE
        self._enter(Phase.ENDING)
        self.mpirun.kill_all()


_A: Any = Attempt
__ = None


@unique
class Event(Enum):
    """What the ranks, the user and the clock do, and what follows in each phase; `__` is nothing."""

    # fmt: off
    #             STARTING         RUNNING          STOPPING       ENDING
    ALL_JOINED  = _A._run_on,      __,              __,            __
    LAST_STEP   = __,              _A._begin_grace, __,            __
    FAILED      = _A._fail,        _A._fail,        _A._fail,      __
    STOP        = _A._ask_all,     _A._ask_all,     _A._ask_all,   __
    SECOND_STOP = (_A._kill_now,) * len(Phase)
    # Timers whose action depends on the phase:
    LATE        = _A._ask_missing, __,              __,            __
    SEE_STEPS   = __,              _A._see_steps,   __,            __
    SEE_GRACE   = __,              __,              _A._see_grace, __
    # fmt: on

    def __init__(self, *actions: Callable[[Attempt], None] | None) -> None:
        self.actions = actions
