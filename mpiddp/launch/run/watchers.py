"""The watchers of an attempt. Whoever reads the launcher for the first time may leave them out.

A watcher sees each event of the record and, once a second, the clock. It may ask ranks, print sentences, or
stop the attempt, which knows none of them by name (`mpiddp.launch.run.attempt`). WATCHERS is their list.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mpiddp.errors import MORE_PROCESSES
from mpiddp.hosts.processes import room_for
from mpiddp.hosts.ssh import ask_hosts
from mpiddp.launch.judge.calls import last_call_with
from mpiddp.launch.judge.events import KINDS, Phase, Record, Stop
from mpiddp.launch.judge.hangs import (
    find_hang,
    missing_sentence,
    next_look_at,
    peer_sentences,
    places_sentence,
)
from mpiddp.launch.judge.pace import WINDOW_S
from mpiddp.launch.judge.stacks import shown_stack
from mpiddp.launch.judge.stragglers import CHRONIC, straggler_sentence, window
from mpiddp.launch.plan.job_plan import search_once
from mpiddp.launch.run.attempt import LOOK_S, Attempt, Watcher
from mpiddp.launch.run.output import OUTPUT_S
from mpiddp.launch.run.restart_args import anew_sentence, is_known
from mpiddp.launch.run.status import job_facts, status_lines
from mpiddp.protocol.group import Peer
from mpiddp.protocol.server import Event
from mpiddp.protocol.terminal import Manners
from mpiddp.protocol.variables import JOIN_TIMEOUT_S, PATIENCE, SAVE_GRACE_S
from mpiddp.text import with_fix

START_TIMEOUT_S = 120.0  # for the first rank to start, and then to join: disk caches may be cold
_PER_RANK = 4  # processes and threads of an agent, its MPI, and its script
PROBE_S = 10.0  # for ranks to start, before the launcher asks whether their hosts still answer
# The steps, or their time, in which a script tells how it resumes.
UNTOLD_STEPS, UNTOLD_S = 100, 60.0
_LARGEST = 16 << 20  # bytes of a record's file; from then on, it gets no frequent events


def _ask_in_thread(
    ask: Callable[[], list[str]], every_s: float, record: Record, phase: Phase
) -> list[str]:
    """Ask in a thread during this phase, because files, names and logins to hosts may hang.

    The answers grow the list.
    """
    answers = list[str]()

    def run() -> None:
        while record.phase <= phase:
            time.sleep(every_s)
            if record.phase is phase:
                answers.extend(ask())

    threading.Thread(target=run, daemon=True).start()
    return answers


class RecordFile(Watcher):
    """Keep the record in a file of the log folder, a line of JSON for each event."""

    _size = 0  # bytes of all lines

    def on_event(self, event: Event) -> None:
        logs = self.launcher.logs
        is_left_out = event.kind in ("progress", "calls", "gpus") and self._size > _LARGEST
        if logs is not None and event.kind in KINDS and not is_left_out:
            line = json.dumps(vars(event)).encode() + b"\n"
            self._size += len(line)
            logs.add(f"attempt_{self.record.fact('began', 'attempt')}.jsonl", line)


class Output(Watcher):
    """Copy the streams of the ranks, and show the status below them on a terminal."""

    def on_event(self, event: Event) -> None:
        if event.kind == "output" and self.record.phase is Phase.ENDED:
            event.facts["connection"].close()  # the launcher has stopped waiting for this rank
        elif event.kind == "output":
            self.output.add(rank=event.rank, **event.facts)
        elif event.kind == "input":
            self.output.send_stdin(event.facts["connection"])
        elif event.kind == "terminal" and event.rank == 0:
            self.output.follow(Manners(event.facts["echo"], event.facts["lines"]))
        elif event.kind in ("joining", "grace", "end") and self.record.phase > Phase.STARTING:
            self.output.keep_mpirun()

    def look(self, now: float) -> None:
        complaints = (
            self.launcher.logs.complaints if self.launcher.logs and self.record.runs else []
        )
        while complaints:
            self.output.log(complaints.pop(0), is_error=True)
        self.output.show_growth()
        if self.record.runs and self.output.shows_status:
            self.output.show_status(status_lines(self.record, now, self.attempt.remark))


class LateStart(Watcher):
    """Limit the time to start and to join, and name the hosts that are lost, or the ranks that are late."""

    _lost_hosts: Sequence[str] = ()  # sentences about hosts whose ranks have not started
    _limit_s, _ends_at, _seen_at = (
        0.0,
        math.inf,
        math.inf,
    )  # for all ranks to join, or for the first one to start
    _is_late = False

    def on_event(self, event: Event) -> None:
        record, agents = self.record, self.attempt.agents
        if record.phase is not Phase.STARTING:
            return
        timeout_s = self.plan.options.timeout_s
        num_started = len(record.latest["started"])
        # All ranks may import torch from a slow file system.
        start_s = max(START_TIMEOUT_S, 2 * (timeout_s or 0))
        match event.kind:
            case "began":
                if not self.plan.starter.may_wait:
                    self._allow(start_s)
                if agents.others and not self.plan.starter.may_wait:
                    self._lost_hosts = _ask_in_thread(self._probe, PROBE_S, record, record.phase)
            case "started" if num_started == record.world_size:
                self._allow(start_s)
            case "started" if num_started == 1:
                self._allow(timeout_s or JOIN_TIMEOUT_S)
            case "joining" if len(record.latest["joining"]) == 1:
                self._allow(event.facts["timeout_s"])
            case "mpirun" if event.facts["code"]:  # its ssh may have failed
                lost = list[str]()
                with suppress(KeyboardInterrupt), self.launcher.signals.interrupting():
                    # A stop ends the logins, and the loop sees its signal as well.
                    lost = self._few_processes() or self._probe()
                if lost:
                    self.attempt.add_act("end", failed=False, why="\n".join(lost), overdue="")

    def _allow(self, seconds: float) -> None:
        self._is_late, self._limit_s, self._ends_at = False, seconds, time.monotonic() + seconds

    def look(self, now: float) -> None:
        record = self.record
        self._ends_at += max(
            0.0, now - self._seen_at - 10 * LOOK_S
        )  # this process was stopped, as by Ctrl-Z
        self._seen_at = now
        if record.phase is not Phase.STARTING:
            return
        if self._lost_hosts:
            self.attempt.stop_ranks("\n".join(self._lost_hosts))
        elif now >= self._ends_at:
            self._is_late, self._ends_at = True, math.inf
            self.notice(seconds=self._limit_s)
            self.attempt.ask_for_stacks(self._name_late_ranks, lambda: self._is_late)
            if not record.latest["started"]:
                # No other limit would end an mpirun that hangs.
                hung = f"no rank has started in {self._limit_s:g} s: mpirun or one of its ssh logins hangs."
                hint = "If a start takes that long, raise --timeout."
                self.attempt.stop_ranks([*self._few_processes(), f"{hung} {hint}"][0])

    def _name_late_ranks(self) -> None:
        record = self.record
        if self._is_late and record.phase is Phase.STARTING:
            sentence = missing_sentence(record, self._limit_s)
            have_all_started = len(record.latest["started"]) == record.world_size
            others_wait = record.latest["joining"] or not have_all_started
            (self.attempt.stop_ranks if others_wait else self.output.log)(sentence)

    def _few_processes(self) -> list[str]:
        """A sentence if this user may not have as many processes as a start takes. Some mpirun hangs then."""
        needed = _PER_RANK * (len(self.record.fact("began", "here")) + 3)
        if (room := room_for(needed)) >= needed:
            return []
        few = f"this user gets only {room} more processes and threads on this machine"
        return [with_fix(f"mpirun could not start the ranks: {few}.", MORE_PROCESSES)]

    def _probe(self) -> list[str]:
        """A sentence for each lost host whose ranks have not started. An mpirun waits minutes for it."""
        agents, started = self.attempt.agents, self.record.latest["started"]
        begun = {self.record.hosts[rank] for rank in started}
        asked = [host for host in agents.others if host.name not in begun]
        try:
            answers = ask_hosts(asked, "print(0)", transport=self.plan.request.hosts.transport)
        except (OSError, RuntimeError):  # this user gets no process for it, or no thread
            return [] if started else self._few_processes()
        lost = {host: answer.why for host, answer in answers.items() if answer.is_lost}
        return [f"lost {host.name} before its ranks started: {why}" for host, why in lost.items()]


class SilentHosts(Watcher):
    """Give up the ranks of hosts that have been silent for --lost-after.

    As long as other ranks call collectives that need a silent one, no rank is lost: only the network of the
    job channel is broken. If the launcher hears none of several hosts, its own network is.
    """

    def look(self, now: float) -> None:
        record, lost_s, silence = self.record, self.server.lost_s, self.server.silence()
        if max(silence.values(), default=0.0) > lost_s / 2:
            self.server.ask(self.server.scripts, "calls")  # whether the steps go on
        heard = {record.hosts[rank] for rank, silent_s in silence.items() if silent_s <= lost_s}
        silent = {rank: silence[rank] for rank in silence if record.hosts[rank] not in heard}
        here = {record.hosts[rank] for rank in record.fact("began", "here")}
        if not heard - here and len({record.hosts[rank] for rank in silent} - here) > 1:
            patience_s = PATIENCE * lost_s
            what = f"no host of the job has answered for {lost_s:g} s, so the network of this one may be down"
            self.output.log(
                f"{what}. Waiting for up to {patience_s:g} s.", "no host", is_error=True
            )
            silent = {rank: silent_s for rank, silent_s in silent.items() if silent_s > patience_s}
        there = [groups for rank, groups in record.calls.items() if record.hosts[rank] in heard]
        if not any(now - last_call_with(silent.keys(), groups) <= lost_s for groups in there):
            for event in self.server.lose_silent(silent):
                self.attempt.on_event(event)


class Hangs(Watcher):
    """Print where the ranks are if the job may hang, and end it after --hang-timeout."""

    _looked_at = _printed_at = 0.0  # when it last found a hang, and when the job last printed
    _has_failed = False

    def on_event(self, event: Event) -> None:
        record, had_failed = self.record, self._has_failed
        self._has_failed = bool(record.latest["claim"] or record.failures)
        if event.kind == "asked":  # by any watcher, or for a viewer
            self.attempt.ask_for_stacks(self._judge, self._is_over)
        elif self._has_failed and not had_failed and record.phase < Phase.ENDING:
            # The verdict names the collectives in which the ranks are now, and they end soon.
            self.attempt.ask_for_stacks(lambda: None)

    def look(self, now: float) -> None:
        """Before the first step, output is the only sign that the job goes on."""
        record = self.record
        if not record.runs:
            return
        if not record.made_steps:
            self._printed_at = self.output.copied_at
        if now >= next_look_at(record, self._looked_at, self._printed_at):
            self.attempt.ask_for_stacks(lambda: None)

    def _is_over(self) -> bool:
        hang = find_hang(self.record, self._printed_at) if self.record.runs else None
        return hang is not None and hang.is_over

    def _judge(self) -> None:
        hang = find_hang(self.record, self._printed_at) if self.record.runs else None
        if hang is not None:
            self._looked_at = time.monotonic()
            self.notice(printed_at=self._printed_at)
            self.output.log(f"{hang.sentence}{hang.stacks}", hang.about, is_error=True)
            if hang.is_over:
                self.attempt.stop_ranks(f"the job hung and was stopped: {hang.sentence}")


class Peers(Watcher):
    """Say which ranks have waited for another one in torch's recv or send, once for each place."""

    def look(self, now: float) -> None:
        if self.record.runs:
            for about, sentence in peer_sentences(self.record, now).items():
                self.output.log(sentence, about)


class Stragglers(Watcher):
    """Ask the scripts for their collectives in each window, and name the ranks for which others wait."""

    _asks_at = 0.0

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._windows = deque[Mapping[str, Any]](maxlen=CHRONIC)
        self._since = self.record.began_at  # of the present window

    def look(self, now: float) -> None:
        record = self.record
        if not record.runs:
            return
        if now >= self._asks_at:
            self._asks_at = now + WINDOW_S
            self.server.ask(self.server.scripts, "calls")
        is_over = now >= self._since + WINDOW_S
        slow = window(record, self._since, now) if is_over else None
        if slow is not None:
            self.notice(**slow)
            self._since = now
            self._windows.append(slow)
            named, self.remark = straggler_sentence(record, [*self._windows])
            if named:  # the same ranks are named once
                self.output.log(self.remark, about=f"stragglers {sorted(named)}")


class GraceTime(Watcher):
    """End the ranks that have not stopped within --grace. A rank that saves has longer."""

    def look(self, now: float) -> None:
        record, limit_s, began = self.record, self.plan.options.grace_s, self.record.act("grace")
        if record.phase is not Phase.STOPPING or began is None:
            return
        is_over = now >= max(record.last_saved_at, began.at) + limit_s
        savers, is_one = record.names(sorted(record.saving)), len(record.saving) == 1
        if savers and now >= began.at + limit_s:
            limit_s, is_over = SAVE_GRACE_S, now >= began.at + SAVE_GRACE_S
            waiting = f"still saving; waiting for at most {limit_s:g} s."
            self.output.log(f"{savers} {'is' if is_one else 'are'} {waiting}", about="who saves")
        # A reader such as `| less`: ranks that print would never end.
        is_unread = now - (self.output.blocked_since or now) >= OUTPUT_S
        if is_unread or (is_over and not record.left):
            self.output.give_up()
        if is_over and record.left:
            late = [rank for rank in record.left if rank in record.latest["started"]]
            after = f"{limit_s:g} s after the request"
            clause = f"{record.names(late)} had not stopped {after} (--grace)"
            if savers:
                clause = f"{savers} {'was' if is_one else 'were'} still saving {after}"
            if record.stop is Stop.BY_USER:
                self.attempt.stop_mpirun(overdue=clause)
            else:
                self.attempt.stop_ranks(f"{clause}.")


class Viewers(Watcher):
    """Answer `mpiddp ps`, `top` and `stacks`."""

    def on_event(self, event: Event) -> None:
        record, answer = self.record, self.launcher.console.answer
        if event.kind == "view_job":
            now, remark = time.monotonic(), self.attempt.remark
            # The kernels exchange something each tenth of --lost-after.
            silence, limit_s = self.server.silence(), self.server.lost_s / 3
            silent = {rank: silence[rank] for rank in silence if silence[rank] > limit_s}
            facts = job_facts(record, self.output.latest, now, remark, silent)
            answer(event.facts["viewer"], **facts)
        elif event.kind == "view_stacks" and record.phase is Phase.HELD:
            between = "no rank runs now: the job restarts."
            answer(event.facts["viewer"], sentence=between, stacks={})
        elif event.kind == "view_stacks":
            self.attempt.ask_for_stacks(partial(self._send_stacks, event.facts["viewer"]))

    def _send_stacks(self, viewer: Peer) -> None:
        texts = self.record.stacks.items()
        stacks = {rank: shown_stack(facts["text"]) for rank, facts in texts}
        sentence = places_sentence(self.record)
        self.launcher.console.answer(viewer, sentence=sentence, stacks=stacks)


class Growth(Watcher):
    """With `--grow`, look for hosts that can join, and stop the ranks for a restart on these as well."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._sentences = list[str]()  # about hosts that can join

    def on_event(self, event: Event) -> None:
        """Search from the beginning on. Once a rank has made its last step, the others have limited time."""
        every_s = self.plan.options.grow_s
        if event.kind == "began" and self.plan.past.grows and every_s is not None:
            search = partial(search_once, self.plan)
            self._sentences = _ask_in_thread(search, every_s, self.record, Phase.RUNNING)
        is_first = event.kind == "stopped" and self.record.phase is Phase.RUNNING
        if is_first and self.record.stop is Stop.TO_GROW:
            self.attempt.add_act("grace")

    def look(self, now: float) -> None:
        """Stop all ranks after their present steps, if hosts can join and no step would be lost."""
        record, announced = self.record, self.record.announcement
        if not (record.runs and self._sentences):
            return
        sentence, why_not = self._sentences.pop(), ""
        most = announced.max_ranks or record.world_size + 1
        if record.stop or record.done or record.world_size >= most:
            return
        if len(record.latest["supports_stop"]) < record.world_size:
            why_not = "not every rank has called mpiddp.should_stop()"
        elif not is_known(self.plan, announced):
            why_not = "the script has announced nothing that resumes it (mpiddp.announce)"
        if why_not:
            self.output.log(f"{sentence}, but {why_not}, so the job continues without a restart.")
            return
        self.output.log(f"{sentence}: stopping to restart.")
        number = int(signal.SIGTERM)
        self.attempt.add_act("stop", by=Stop.TO_GROW.name, reason=sentence, signal=number)
        self.server.ask(self.server.connected, "stop", signal=number)


class Restarts(Watcher):
    """With --max-restarts, say once if nothing tells how a restart resumes the script."""

    _began_at = math.inf  # when the first step was reported

    def on_event(self, event: Event) -> None:
        if event.kind == "progress":
            self._began_at = min(self._began_at, event.at)

    def look(self, now: float) -> None:
        record, past = self.record, self.plan.past
        if past.made_steps or not (record.runs and self.plan.options.max_restarts):
            return  # the restart after those steps has said it
        is_long = record.newest_step >= UNTOLD_STEPS or now - self._began_at >= UNTOLD_S
        if is_long and not is_known(self.plan, record.announcement):
            self.output.log(anew_sentence("a restart would begin"), about="how it resumes")


class Functions(Watcher):
    """Under `mpiddp.spawn`, give each rank its function, and take its answer."""

    def on_event(self, event: Event) -> None:
        exchange = self.launcher.exchange
        if exchange is not None and event.kind == "began":
            exchange.begin(self.server)
        elif exchange is not None and event.kind in ("function", "answer"):
            exchange.take(event, self.server)


WATCHERS: tuple[type[Watcher], ...] = (
    *(RecordFile, Output, LateStart, SilentHosts, Hangs, Peers, Stragglers),
    *(GraceTime, Viewers, Growth, Restarts, Functions),
)
