"""Looks at the ranks: ask them for their stacks and calls, and print late ranks, hangs and stragglers."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from mpiddp.launch.judge.events import Phase, Record
from mpiddp.launch.judge.hangs import (
    Hang,
    find_hang,
    missing_sentence,
    next_look_at,
    places_sentence,
)
from mpiddp.launch.judge.pace import WINDOW_S
from mpiddp.launch.judge.stacks import shown_stack
from mpiddp.launch.judge.stragglers import find_stragglers, straggler_sentence
from mpiddp.launch.run.agents import Agents
from mpiddp.launch.run.growth import ask_in_thread
from mpiddp.launch.run.handover import gone
from mpiddp.protocol.group import Peer

PROBE_S = 10.0  # for ranks to start, before the launcher asks whether their hosts still answer
STACKS_S, INTERRUPTED_S = 4.0, 1.0  # for ranks to send their stacks, and after an interrupt


class Looks:
    """The looks at one attempt, which `end_job` ends for the reason that it gets."""

    def __init__(
        self, agents: Agents, record: Record, end_job: Callable[[str], None], is_over: Event
    ) -> None:
        self._agents, self._console = agents, agents.launcher.console
        self._server, self._output = agents.server, agents.output
        self._record, self._end_job = record, end_job
        self._timers = agents.server.selector
        self._viewers: list[Peer] = []  # they wait for the stacks
        self._is_asking = False  # for stacks, of which some may still come
        self._lost_hosts = list[str]()  # sentences about hosts whose ranks have not started
        if agents.has_logged_in:
            self._lost_hosts = ask_in_thread(self.probe_late, PROBE_S, is_over)

    def see_start(self, now: float) -> None:
        """End a start that hangs: a host is lost, or the limit of time is over."""
        record, limit = self._record, self._record.act("limit")
        if self._lost_hosts:
            self._end_job("\n".join(self._lost_hosts))
        elif limit and not record.is_late and now >= limit.at + limit.facts["seconds"]:
            record.note("late")
            if record.latest["started"]:
                self.ask_for_stacks()
                return
            # No other limit would end an mpirun that hangs.
            why = "mpirun or one of its ssh logins hangs. If a start takes that long, raise --timeout."
            self._end_job(f"no rank has started in {limit.facts['seconds']:g} s: {why}")

    def probe_late(self) -> list[str]:
        """A sentence for each lost host whose ranks have not started. An mpirun waits minutes for it."""
        started = self._record.latest["started"]
        late = {host for rank, host in enumerate(self._record.hosts) if rank not in started}
        return gone(self._agents.plan.request, late) if late and self._agents.has_logged_in else []

    def see(self, now: float) -> None:
        record = self._record
        since = record.windows[-1].at if record.windows else record.began_at
        is_over = now >= since + WINDOW_S
        late = find_stragglers(record.calls, record.world_size, since, now) if is_over else None
        if late is not None:
            record.note("window", **late)
            ranks, sentence = straggler_sentence(record)
            if ranks:  # the same ranks are named once
                self._output.log(sentence, about=f"stragglers {sorted(ranks)}")
        printed, copied_at = record.act("printed"), self._output.copied_at
        if not record.newest_step and (printed is None or printed.at != copied_at):
            record.note("printed", at=copied_at)
        if now >= next_look_at(record):
            self.ask_for_stacks()

    def silence_of_lost(self, now: float) -> dict[int, float]:
        """The ranks whose hosts have been silent for --lost-after, with the seconds of their silence.

        As long as other ranks make steps, no rank is lost: the collectives of these steps need all ranks, so
        only the network of the job channel is broken. The steps of ranks without collectives prove nothing.
        """
        record, lost_s = self._record, self._server.lost_s
        silence = self._server.silence()
        heard = {record.hosts[rank] for rank, silent_s in silence.items() if silent_s <= lost_s}
        silent = {rank: silence[rank] for rank in silence if record.hosts[rank] not in heard}
        steps = {rank: event.at for rank, event in record.latest["progress"].items()}
        has_collectives = any(record.called_at.values())
        times = [*steps.items(), *record.called_at.items()] if silent and has_collectives else []
        goes_on = any(now - at <= lost_s for rank, at in times if record.hosts[rank] in heard)
        return {} if goes_on else silent

    def answer(self, viewer: Peer) -> None:
        """Send a viewer the stacks, once they are there."""
        self._viewers.append(viewer)
        self.ask_for_stacks()

    def see_early(self) -> None:
        """See the stacks as soon as all have come."""
        if self._is_asking and not self._record.unanswered:
            self._see_stacks()

    def ask_for_calls(self) -> None:
        """Ask the scripts for their collectives, now and after each window."""
        self._server.ask(self._server.scripts, "calls")
        self._timers.after(WINDOW_S, self.ask_for_calls)

    def ask_for_stacks(self) -> None:
        """Ask the ranks for their stacks, unless they are being asked already."""
        if self._is_asking:
            return
        self._is_asking = True
        self._record.note("asked", ranks=sorted(self._server.connected))
        self._server.ask(self._server.connected, "stacks")
        self._timers.after(STACKS_S, self._interrupt)
        limit_s = STACKS_S + INTERRUPTED_S if self._record.unanswered else 0.0
        self._timers.after(limit_s, self._see_stacks)

    def _interrupt(self) -> None:
        """Have agents interrupt scripts that do not answer, but only if the job is to be ended.

        A script that is only slow must not be interrupted.
        """
        hang = self._find_hang()
        if self._is_late or (hang is not None and hang.is_over):
            self._server.ask(self._record.unanswered, "stacks", agents=True)

    def _see_stacks(self) -> None:
        """Judge the stacks: all have come, or the time is over."""
        self._is_asking = False
        self._timers.cancel(self._interrupt, self._see_stacks)
        record = self._record
        stacks = {rank: shown_stack(facts["text"]) for rank, facts in record.stacks.items()}
        while self._viewers:
            viewer, sentence = self._viewers.pop(), places_sentence(record)
            self._console.answer(viewer, sentence=sentence, stacks=stacks)
        if self._is_late:
            sentence = missing_sentence(record, record.fact("limit", "seconds"))
            has_started = len(record.latest["started"]) == record.world_size
            others_wait = record.latest["joining"] or not has_started
            (self._end_job if others_wait else self._output.log)(sentence)
        if (hang := self._find_hang()) is not None:
            record.note("looked")
            self._output.log(hang.sentence, hang.about, is_error=True)
            if hang.is_over:
                self._end_job("the job hung and was stopped.")

    def _find_hang(self) -> Hang | None:
        is_running = self._record.phase is Phase.RUNNING and bool(self._record.left)
        return find_hang(self._record) if is_running else None

    @property
    def _is_late(self) -> bool:
        """Whether ranks are to be named that have not joined in time."""
        return self._record.phase is Phase.STARTING and self._record.is_late
