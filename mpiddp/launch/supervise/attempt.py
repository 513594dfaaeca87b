"""What one attempt at a job does about each event: phases, limits, and the order in which things end.

`Attempt._TABLE`, at the end, is the whole state machine. `mpiddp.launch.supervise.run` waits for the events,
and `mpiddp.launch.supervise.verdict` judges what has happened.
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from mpiddp.launch.exchange import Exchange
from mpiddp.launch.grow import HostSearch
from mpiddp.launch.monitor.console import Console
from mpiddp.launch.monitor.monitor import Monitor
from mpiddp.launch.monitor.ranks import Ranks, late_clause, missing_sentence
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.supervise.control import ControlServer, StackRequests
from mpiddp.launch.supervise.mpirun import MpirunProcess
from mpiddp.launch.supervise.phases import Event, Phase
from mpiddp.launch.supervise.verdict import Stop, StopRecord
from mpiddp.protocol.server import Message
from mpiddp.protocol.variables import JOIN_TIMEOUT_S
from mpiddp.protocol.viewers import STACKS

# Time limits for:
START_TIMEOUT_S = 120.0  # the first rank to start; disk caches may be cold
SPREAD_S = 3.0  # a failure to reach all ranks by itself
END_S = 2.0  # ranks to end after an "end" message
STOP_S = 5.0  # mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
EXIT_S = 10.0  # mpirun to end once no rank is left

SAVE_GRACE_S = 600.0  # ranks to stop, from the request on, while one of them saves
CHECK_S = 1.0  # between two looks at the ranks' steps, or at their saves
ACCEPT_AGAIN_S = 1.0  # until a machine without files is asked again


@dataclass(frozen=True)
class Terms:
    """What an attempt gets from its job.

    Args:
        stop_at: when --stop-after is over, in time.monotonic()'s seconds: a batch system's clock runs on
            while this process is stopped.
        exchange: of the function that every rank runs, if the job is no script.
        search: for hosts that can join; None without `--grow`.
        console: for viewers, see `mpiddp top`.
    """

    options: LaunchOptions
    stop_at: float = float("inf")
    exchange: Exchange = field(default_factory=Exchange)
    search: HostSearch | None = None
    console: Console = field(default_factory=Console)


Action = Callable[["Attempt"], None] | None
__ = None


class Attempt:
    """The state of an attempt whose mpirun has just started."""

    def __init__(
        self, terms: Terms, ranks: Ranks, server: ControlServer, mpirun: MpirunProcess
    ) -> None:
        self._terms = terms
        self._options = terms.options
        self.ranks = ranks
        self._server = server
        self._mpirun = mpirun
        self._timers = server.selector
        self._phase = Phase.STARTING
        self._stop = Stop.NONE
        self._judged_stop: Stop | None = (
            None  # the stop before the job began to end, if another came then
        )
        self._stop_reason = ""
        self._stopping_since = 0.0
        self._says_saving = False
        self._limit = ""  # the time limit of a stop that the ranks exceeded
        self._rank_failed = False  # after the user's request
        self._join_timeout_s = 0.0
        self._stacks = StackRequests(ranks, server)
        self.monitor = Monitor(ranks, terms.options, self._timers.now())
        self._joined_at = 0.0
        self._found = ""  # a host that can join, and how
        self._said: set[str] = set()
        self.ended_because = ""  # the reason, if this launcher has ended the job as one that failed
        self._start_timeout_s = max(START_TIMEOUT_S, 2 * (terms.options.timeout_s or 0))
        if not mpirun.starter.kind.has_scheduler:  # srun may wait for other job steps to end
            self._timers.after(self._start_timeout_s, Event.START_TIMEOUT)

    @property
    def stop(self) -> StopRecord:
        """What the verdict has to know. A request that came after a failure explains nothing."""
        by = self._stop if self._judged_stop is None else self._judged_stop
        return StopRecord(by, self._limit, self._rank_failed)

    @property
    def stopped_by(self) -> Stop:
        """The last request to stop: after one of the user, the job does not restart."""
        return self._stop

    def on(self, event: Event) -> None:
        """React to an event as `_TABLE` says."""
        if action := self._TABLE[event][self._phase.value]:
            action(self)
        if self._phase.value > Phase.RUNNING.value:
            self._mpirun.output.show_status([])

    def on_signal(self, number: int) -> None:
        if self._stop < Stop.BY_USER:
            self.request_stop(signal.Signals(number).name)
        elif number != signal.SIGHUP:  # a closing terminal may send two
            self.on(Event.SECOND_STOP)

    def request_stop(self, reason: str) -> None:
        """The user requests a stop, unless this has happened before."""
        if self._stop < Stop.BY_USER:
            if self._phase is Phase.ENDING:
                self._judged_stop = self._stop
            self._stop, self._stop_reason = Stop.BY_USER, reason
            self.on(Event.STOP)

    def on_message(self, message: Message) -> None:
        """React to a message of a rank."""
        self.ranks.note(message)
        self._stacks.note(message)
        match message.kind:
            case "started":
                self.on(Event.STARTED)
                if self._stop is Stop.BY_USER:
                    self._server.request_stop(message.rank)
            case "mpi_init" if not self.ranks.joining:  # of which MPI waits for all
                if not message.facts["active"]:
                    self._timers.cancel(Event.JOIN_TIMEOUT)
                elif len(self.ranks.in_mpi_init) == 1:
                    self._join_timeout_s = self._options.timeout_s or JOIN_TIMEOUT_S
                    self.on(Event.FIRST_JOINED)
            case "joining":
                self._join_timeout_s = message.facts["timeout_s"]
                if len(self.ranks.joining) == 1:
                    self.on(Event.FIRST_JOINED)
                if len(self.ranks.joining) == self.ranks.world_size:
                    self.on(Event.ALL_JOINED)
            case "stopped":
                self.on(Event.LAST_STEP)
            case "progress":
                self._server.confirm(message)
            case "failed" | "lost" if message.rank in self.ranks.failures:
                self.on(Event.HOST_LOST if message.facts.get("silent") else Event.FAILED)
        if self._stacks.are_complete:
            self._report()
        if self.ranks.done and not self._server.has_ranks:
            self.on(Event.ALL_LEFT)

    def on_full(self, error: str) -> None:
        """The ranks' connections wait, for want of files or memory."""
        self._log(
            f"ranks cannot connect: {error}. They can as soon as there is room. A job needs three open files "
            "for each rank (ulimit -n).",
            is_error=True,
        )
        self._timers.after(ACCEPT_AGAIN_S, Event.ACCEPT_AGAIN)

    def on_found(self, found: str) -> None:
        """A look for hosts that can join the job has found one."""
        self._found = found
        self.on(Event.HOST_FOUND)

    def on_viewer(self, viewer: socket.socket, want: str) -> None:
        """A viewer wants the state of the job, or the stacks of its ranks."""
        if want == STACKS:
            self._terms.console.let_wait(viewer)
            self._request_stacks(Event.VIEW_STACKS)
            return
        facts = self.monitor.job_facts(self._mpirun.output.latest, self._timers.now())
        self._terms.console.answer(viewer, {**facts, "phase": self._phase.name.lower()})

    def _answer_viewers(self) -> None:
        self._terms.console.answer_all(self.monitor.stacks_facts())

    def _log(self, sentence: str, *, is_error: bool = False) -> None:
        """Print a sentence, at most once in an attempt."""
        if sentence not in self._said:
            self._said.add(sentence)
            self._mpirun.output.log(sentence, is_error=is_error)

    # --- starting, joining ---

    def _join(self) -> None:
        self._phase = Phase.JOINING
        self._timers.cancel(Event.START_TIMEOUT)
        self._timers.after(self._start_timeout_s, Event.START_TIMEOUT)

    def _unstarted(self) -> None:
        """mpirun hangs, and no other limit would end it."""
        self._end_job(
            f"no rank has started in {self._start_timeout_s:g} s: mpirun or one of its ssh logins "
            "hangs. If a start takes that long, raise --timeout."
        )

    def _see_start(self) -> None:
        """All ranks may import torch from a file system that is away, or is only slow."""
        if not self.ranks.joining:
            self._request_stacks(Event.START_STACKS)

    def _tell_start(self) -> None:
        self._log(missing_sentence(self.ranks, self._start_timeout_s))

    def _await_rest(self) -> None:
        self._timers.cancel(Event.JOIN_TIMEOUT)
        self._timers.after(self._join_timeout_s, Event.JOIN_TIMEOUT)

    def _seek(self) -> None:
        self._request_stacks(Event.JOIN_STACKS)

    def _not_joined(self) -> None:
        self._end_job(missing_sentence(self.ranks, self._join_timeout_s))

    def _run_on(self) -> None:
        self._phase = Phase.RUNNING
        self._joined_at = self._timers.now()
        self._see_steps()
        if self._terms.search is not None:
            self._terms.search.begin()

    # --- running ---

    def _see_steps(self) -> None:
        """Look at the running job, and at its stacks if it is quiet."""
        if self.ranks.all_done:
            return
        now = self._timers.now()
        for sentence in self.monitor.look(now, now - self._joined_at):
            self._log(sentence)
        if self.monitor.wants_stacks(now, self._mpirun.output.idle_s):
            self._request_stacks(Event.HANG_STACKS)
        if self.monitor.wants_look(now):
            self._request_stacks(Event.LOOK_STACKS)
        if self._mpirun.output.shows_status:
            attempt = self._terms.console.attempts
            self._mpirun.output.show_status(self.monitor.status_lines(attempt, now))
        longest = min(CHECK_S, self._options.hang_timeout_s or CHECK_S)
        # At random moments, which fall on all parts of a step.
        self._timers.after(random.uniform(longest / 2, longest), Event.SEE_STEPS)

    def _judge_stacks(self) -> None:
        """Say who hangs. With --hang-timeout, this ends the job."""
        if self.ranks.all_done:
            return
        sentences = self.monitor.look_at_stacks(self._timers.now())
        for sentence in sentences:
            self._log(sentence, is_error=True)
        if sentences and self._options.hang_timeout_s is not None:
            self._end_job("the job hung and was stopped.")

    def _note_look(self) -> None:
        for sentence in self.monitor.look_at_steps(self._timers.now()):
            self._log(sentence)

    def _request_stacks(self, event: Event) -> None:
        self._stacks.request(event)
        if self._stacks.are_complete:
            self._report()

    def _interrupt(self) -> None:
        """Press ranks that do not answer, if their stacks are for a verdict: one may only be slow."""
        is_guess = self._options.hang_timeout_s is None
        guesses = {Event.HANG_STACKS} if is_guess else set()
        self._stacks.interrupt(but_for={Event.VIEW_STACKS, Event.LOOK_STACKS} | guesses)

    def _report(self) -> None:
        for event in self._stacks.take():
            self.on(event)

    def _grow(self) -> None:
        """Stop all ranks after their present steps, however long these take, unless work would be lost."""
        most = self.ranks.announcement.max_ranks
        is_full = most is not None and self.ranks.world_size >= most
        is_last_interval = self._terms.stop_at - time.monotonic() < (self._options.grow_s or 0.0)
        if self._stop or self.ranks.done or is_full or is_last_interval:
            return
        if why_not := self.ranks.why_not_resumable:
            self._log(f"{self._found}, but {why_not}, so the job continues without a restart.")
            return
        self._log(f"{self._found}: stopping to restart.")
        self._stop = Stop.TO_GROW
        self._ask_to_stop()

    # --- stopping, saving ---

    def _ask_all(self) -> None:
        """The user's first request: stop all ranks, within the time limits."""
        if not self._server.has_ranks:
            self._end_mpirun()
            return
        self._ask_to_stop()
        self._begin_grace()
        if self._phase is not Phase.SAVING:  # to grow
            self._phase = Phase.STOPPING
        if self.ranks.supports_stop:
            self._log(
                f"{self._stop_reason}: the ranks are saving and stopping; another signal kills them at once."
            )

    def _ask_to_stop(self) -> None:
        for rank in self._server.connected:
            self._server.request_stop(rank)

    def _begin_grace(self) -> None:
        self._stopping_since = self._timers.now()
        self._timers.cancel(Event.SEE_GRACE)
        self._timers.after(self._options.grace_s, Event.SEE_GRACE)

    def _save(self) -> None:
        self._phase = Phase.SAVING

    def _save_grown(self) -> None:
        if self._stop is Stop.TO_GROW:
            self._begin_grace()  # the others are in the same step
            self._save()

    def _see_grace(self) -> None:
        """End the ranks that have not stopped in time. A rank that saves has longer."""
        grace_s, save_grace_s = self._options.grace_s, SAVE_GRACE_S
        now = self._timers.now()
        since_stop = now - self._stopping_since
        since_save = now - max(self.ranks.last_saved_at, self._stopping_since)
        saving = sorted(self.ranks.saving)
        if saving and since_stop < save_grace_s:
            if not self._says_saving:
                self._says_saving = True
                self._log(
                    f"{self.ranks.names(saving)} {'is' if len(saving) == 1 else 'are'} still saving; "
                    f"waiting for at most {save_grace_s:g} s."
                )
            self._timers.after(min(CHECK_S, save_grace_s - since_stop), Event.SEE_GRACE)
        elif not saving and since_save < grace_s:  # after a save, a rank still has to leave
            self._timers.after(grace_s - since_save, Event.SEE_GRACE)
        else:
            self._end_late(is_saving=bool(saving))

    def _end_late(self, *, is_saving: bool) -> None:
        limit_s = SAVE_GRACE_S if is_saving else self._options.grace_s
        self._limit = late_clause(self.ranks, limit_s)
        if self._stop is Stop.BY_USER:
            self._end_mpirun()
        else:
            self._end_job(f"{self._limit}.")

    # --- ending ---

    def _spread(self) -> None:
        """Give a failure time: most starters end the other ranks, and the ranks' own watch always does."""
        self._fail(SPREAD_S)

    def _end_soon(self) -> None:
        """Only this process notices a host that has stopped answering."""
        self._fail(0.0)

    def _fail(self, spread_s: float) -> None:
        self._rank_failed = self._stop is Stop.BY_USER
        self._phase = Phase.ENDING
        self._timers.after(spread_s, Event.END_RANKS)
        self._timers.after(spread_s + 1.0, Event.END_MPIRUN)

    def _await_exit(self) -> None:
        self._timers.after(EXIT_S, Event.END_MPIRUN)

    def _end_job(self, reason: str) -> None:
        self.ended_because = reason
        self._phase = Phase.ENDING
        self._end_ranks()
        self._timers.after(END_S, Event.END_MPIRUN)

    def _end_ranks(self) -> None:
        self._server.end_all(code=1)

    def _end_mpirun(self) -> None:
        self._phase = Phase.ENDING
        self._timers.cancel(Event.END_MPIRUN)
        self._mpirun.stop()
        # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
        self._timers.after(STOP_S, Event.KILL)

    def _kill(self) -> None:
        self._mpirun.kill_all()

    def _kill_now(self) -> None:
        self._stop = Stop.AT_ONCE
        self._phase = Phase.ENDING
        self._kill()

    def _accept(self) -> None:
        self._server.accept_again()

    # What each event does in each phase, and "__" for nothing.
    # fmt: off
    _TABLE: ClassVar[dict[Event, tuple[Action, ...]]] = {
        #                     STARTING     JOINING      RUNNING      STOPPING     SAVING       ENDING
        Event.STARTED:       (_join,       __,          __,          __,          __,          __),
        Event.FIRST_JOINED:  (_await_rest, _await_rest, __,          __,          __,          __),
        Event.ALL_JOINED:    (_run_on,     _run_on,     __,          __,          __,          __),
        Event.HOST_FOUND:    (__,          __,          _grow,       __,          __,          __),
        Event.STOP:          (_ask_all,    _ask_all,    _ask_all,    __,          _ask_all,    __),
        Event.LAST_STEP:     (__,          __,          _save_grown, _save,       __,          __),
        Event.ALL_LEFT:      (_await_exit, _await_exit, _await_exit, _await_exit, _await_exit, __),
        Event.FAILED:        (_spread,     _spread,     _spread,     _spread,     _spread,     __),
        Event.HOST_LOST:     (_end_soon,   _end_soon,   _end_soon,   _end_soon,   _end_soon,   __),
        Event.SECOND_STOP:   (_kill_now,   _kill_now,   _kill_now,   _kill_now,   _kill_now,   _kill_now),
        # Timers, and what the stacks that one of them has requested are for:
        Event.START_TIMEOUT: (_unstarted,  _see_start,  __,          __,          __,          __),
        Event.START_STACKS:  (__,          _tell_start, __,          __,          __,          __),
        Event.JOIN_TIMEOUT:  (_seek,       _seek,       __,          __,          __,          __),
        Event.JOIN_STACKS:   (_not_joined, _not_joined, __,          __,          __,          __),
        Event.SEE_STEPS:     (__,          __,          _see_steps,  __,          __,          __),
        Event.HANG_STACKS:   (__,          __,          _judge_stacks, __,        __,          __),
        Event.LOOK_STACKS:   (__,          __,          _note_look,  __,          __,          __),
        Event.VIEW_STACKS:   (_answer_viewers,) * len(Phase),
        Event.STACKS_LATE:   (_interrupt,  _interrupt,  _interrupt,  __,          __,          __),
        Event.STACKS_OVER:   (_report,     _report,     _report,     _report,     _report,     _report),
        Event.SEE_GRACE:     (__,          __,          __,          _see_grace,  _see_grace,  __),
        Event.END_RANKS:     (__,          __,          __,          __,          __,          _end_ranks),
        Event.END_MPIRUN:    (_end_mpirun, _end_mpirun, _end_mpirun, _end_mpirun, _end_mpirun, _end_mpirun),
        Event.KILL:          (__,          __,          __,          __,          __,          _kill),
        Event.ACCEPT_AGAIN:  (_accept,     _accept,     _accept,     _accept,     _accept,     _accept),
    }
    # fmt: on
