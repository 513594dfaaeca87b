"""One job: LaunchOptions come in, one attempt after another is made, and the job's Outcome goes out.

A restart in new agents begins with a preflight of all hosts, like a start. A broken host is left out if the
options allow it, and takes part again once it answers. With `--grow`, a job that could have more ranks stops,
saves and restarts. A restart receives the job's announcement (see `mpiddp.runtime.reports`).
"""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import ExitStack, closing
from enum import Enum, auto
from pathlib import Path

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.hosts.allocations import seconds_left
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.names import forget_addresses
from mpiddp.hosts.ssh import Logins
from mpiddp.launch import log
from mpiddp.launch.judge.events import Announcement, Outcome, Phase, Stop
from mpiddp.launch.judge.verdict import PREEMPTED
from mpiddp.launch.plan.job_plan import Plan, make_plan, plan_without, read_hosts
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.run.agents import STOP_AFTER, Agents, Launcher, start
from mpiddp.launch.run.attempt import Attempt
from mpiddp.launch.run.control import Console, Exchange, SignalQueue
from mpiddp.launch.run.log_folder import LogFolder
from mpiddp.launch.run.outcome_file import Report, outcome_of, print_outcome
from mpiddp.launch.run.requeue import is_preempted
from mpiddp.launch.run.restart_args import (
    added,
    anew_sentence,
    is_known,
    missing_path,
    missing_sentence,
)
from mpiddp.launch.run.watchers import WATCHERS
from mpiddp.text import all_of, counted

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


def run(options: LaunchOptions, report: Report, exchange: Exchange | None = None) -> Outcome:
    """Plan the job, run it, and restart it after each failure, at most `--max-restarts` times, and to grow.

    Raises UserError or JobFailed if the first attempt cannot be started, and KeyboardInterrupt before it has.
    """
    with closing(SignalQueue()) as signals:
        try:
            outcome = _run(options, report, exchange, signals)
        except (UserError, JobFailed, KeyboardInterrupt):
            if _asked_by_person(signals) or not is_preempted(os.environ):
                raise
            outcome = Outcome(STOPPED, PREEMPTED)
        return outcome._replace(is_by_person=outcome.is_by_person or _asked_by_person(signals))


def _asked_by_person(signals: SignalQueue) -> bool:
    """Whether Ctrl-C, `mpiddp stop` or a closing terminal has requested a stop. Slurm sends other signals."""
    signals.receive()
    return not signals.counts.keys().isdisjoint([signal.SIGINT, signal.SIGHUP])


def _run(
    options: LaunchOptions, report: Report, exchange: Exchange | None, signals: SignalQueue
) -> Outcome:
    logins = Logins()
    stop_at, why_stop = time.monotonic() + (options.stop_after_s or math.inf), STOP_AFTER
    if options.stop_after_s is None:
        left_s, scheduler = seconds_left(os.environ)
        stop_at = time.monotonic() + left_s - min(2 * options.grace_s, left_s / 10)
        why_stop = f"the time limit of {scheduler} is near"
    with closing(logins), ExitStack() as stack:
        console = stack.enter_context(closing(Console(report.name)))
        with signals.interrupting():
            plan = make_plan(options, os.environ, logins=logins, on_wait=report.begin)
        folder = report.folder
        if options.log_dir:  # in it, a folder that no other launch uses
            folder = Path(options.log_dir, time.strftime(f"launch_%Y-%m-%d_%H.%M.%S_{os.getpid()}"))
        logs = stack.enter_context(closing(LogFolder(folder))) if folder else None
        launcher = Launcher(signals, console, stop_at, why_stop, exchange, logs, logins)
        job = stack.enter_context(closing(Job(launcher, plan, report)))
        outcome = job.attempt()
        while (move := job.next_move(outcome)) is not Move.END:
            outcome = job.go_on(move, outcome)
        if outcome.code == DONE and job.lost_stream:
            lost = f"all ranks are done, but not all of their {job.lost_stream} could be written."
            outcome = outcome._replace(code=FAILED, sentence=lost)
        if logs and outcome.code == BAD_INPUT:
            logs.complains = False
        is_over = why_stop == STOP_AFTER and time.monotonic() >= stop_at
        return outcome._replace(announcement=job.announcement_at_end(outcome), is_by_person=is_over)


class Move(Enum):
    """The next step of the job."""

    END = auto()
    RESTART = auto()  # after a failure, which counts for --max-restarts
    GROW = auto()  # restart on more hosts
    SHRINK = auto()  # return to the hosts that it had before it grew


class Job:
    def __init__(self, launcher: Launcher, plan: Plan, report: Report) -> None:
        self.launcher, self.report = launcher, report
        self.plan, self.options = plan, plan.options  # the plan of the latest attempt
        self.past = plan.past  # for the next plan
        self.waiting: Attempt | None = None  # the latest attempt, if its agents wait for the next
        self.failures_in_a_row = 0  # without a step between them
        self.lost_stream = ""  # the name of a stream that could not be written as a whole
        self.at_fault = ""  # the host that ended the latest attempt, by its key
        self.grown_from: Plan | None = None  # until a job on more hosts makes a step
        self.has_input = False  # whether rank 0 has got input that is not repeated

    def close(self) -> None:
        """End the agents that wait for an attempt."""
        if self.waiting is not None:
            self.waiting.end_agents()
            self.waiting = None

    def attempt(self) -> Outcome:
        """Run the latest plan. If a host has ended two attempts in a row, later attempts avoid it."""
        past, began_at = self.past._replace(named=self.plan.past.named), time.time()
        self.plan = self.plan._replace(past=past)
        try:
            attempt = self._begin()
            outcome = attempt.run()
            self.waiting = attempt if attempt.record.phase is Phase.HELD else None
            self.lost_stream = self.lost_stream or attempt.output.lost_stream
            self.has_input |= attempt.output.has_input
        except KeyboardInterrupt:  # before mpirun has started
            outcome = _INTERRUPTED if past.attempts else Outcome(INTERRUPTED, "interrupted.")
        except (UserError, JobFailed, OSError, RuntimeError) as error:
            if not past.attempts:
                raise
            outcome = _failed_start(error)
        if outcome.made_steps:
            self.grown_from = None
        if self.grown_from and past.grows and outcome.code == INTERRUPTED:
            # The job stopped to grow, and had saved its steps.
            outcome = outcome._replace(code=STOPPED, sentence=_STOPPED.sentence)
        at_fault = outcome.host_at_fault and self.plan.key_of(outcome.host_at_fault)
        doubts = {**past.doubts}
        if at_fault and at_fault == self.at_fault:
            doubts[at_fault] = f"{at_fault} has ended two attempts in a row"
        self.at_fault = at_fault
        self.past = past._replace(
            attempts=past.attempts + 1,
            announced=past.announced.after(outcome.announcement),
            made_steps=past.made_steps or outcome.made_steps,
            doubts=doubts,
            num_hosts=past.num_hosts or len(self.plan.hosts.usable),
        )
        self.report.add(began_at, self.plan.request.names_of_ranks, outcome)
        return outcome

    def _begin(self) -> Attempt:
        """Begin an attempt by the latest plan, in the agents that wait if the plan is theirs.

        Hosts that the others do not reach are left out. Raises JobFailed if too few remain.
        """
        if self.waiting is not None:
            agents = self.waiting.agents
            if agents.plan.request is self.plan.request and self.waiting.begin_again(self.plan):
                return Attempt(agents, WATCHERS)
            self.close()
            if self.launcher.signals.has_stop():  # it arrived before the agents began again
                raise KeyboardInterrupt
        while not isinstance(started := start(self.launcher, self.plan), Agents):
            self.plan = plan_without(self.plan, started)
        self.report.begin()
        return Attempt(started, WATCHERS)

    def next_move(self, latest: Outcome) -> Move:
        self.pause_s = 0.0  # before the next attempt
        if latest.stop >= Stop.BY_USER or latest.code in (DONE, INTERRUPTED):
            return Move.END
        if latest.stop is Stop.TO_GROW and latest.rank is None:  # no rank has failed by itself
            return Move.GROW
        if self.grown_from and latest.code in (FAILED, BAD_INPUT):
            return Move.SHRINK
        if latest.code != FAILED or self.past.failures >= self.options.max_restarts:
            return Move.END
        self.failures_in_a_row = 1 if latest.made_steps else self.failures_in_a_row + 1
        if self.failures_in_a_row > 1:  # the first restart begins at once
            doubled = _FIRST_PAUSE_S * 2 ** min(self.failures_in_a_row - 2, 10)
            self.pause_s = min(doubled, _LONGEST_PAUSE_S)
        if time.monotonic() + self.pause_s >= self.launcher.stop_at:
            why = self.launcher.why_stop.replace(STOP_AFTER, f"the time of {STOP_AFTER} is over")
            log.error(f"the job is not restarted, because {why}.")
            return Move.END
        return Move.RESTART

    def go_on(self, move: Move, latest: Outcome) -> Outcome:
        """Make the next attempt, as the move says. Returns its outcome, or why it has not begun."""
        interrupted, before, count = _INTERRUPTED, self.plan, ""
        if move is Move.GROW and latest.code == STOPPED:
            interrupted = _STOPPED  # all ranks have saved, so a stop loses no step
        else:
            print_outcome(latest)
            self.past = self.past._replace(grows=self.past.grows and move is Move.RESTART)
        if move is Move.RESTART:
            self.past = self.past._replace(failures=self.past.failures + 1)
            count = f" (restart {self.past.failures} of {self.options.max_restarts})"
        try:
            if move is Move.SHRINK and self.grown_from is not None:
                self.plan, self.grown_from = self.grown_from, None
            else:
                self.plan = self._plan_again()
            untold = self._resume()
        except KeyboardInterrupt:
            return interrupted
        except (UserError, JobFailed, OSError, RuntimeError) as error:
            if move is Move.RESTART:  # a host, or a process, may be usable after the next pause
                return _failed_start(error)
            untold = ""
            log.error(
                f"{error}\nThe job goes on with the hosts of the last attempt, which have just worked."
            )
        hosts, announced = self.plan.request.hosts, self.past.announced
        if move is Move.GROW and hosts.world_size > before.request.hosts.world_size:
            self.grown_from = before
        elif move is Move.GROW:  # each search in vain costs a stop and a start
            self.past = self.past._replace(grows=False)
            log.info("the job has not grown. From now on, hosts join only at a restart.")
        if self.has_input:
            log.error("rank 0 has read input of stdin, which the restart does not repeat.")
        log.info(f"restarting on {all_of([host.name for host in hosts.hosts])}{count}.")
        if untold:
            log.info(untold)
        if announced.global_batch_size is not None and hosts.world_size != announced.world_size:
            ranks = f"{counted(hosts.world_size, 'rank')} instead of {announced.world_size}"
            log.info(f"{ranks}; the global batch stays at {announced.global_batch_size}.")
        return self.attempt()

    def _resume(self) -> str:
        """Add the arguments that resume the script to the next attempt. Returns a sentence if it begins anew.

        Arguments that a restart has added stay, because the hot spares have them. Raises KeyboardInterrupt
        and JobFailed.
        """
        past = self.past
        if past.resume_args:
            return ""
        args = past.announced.resume_args or self.options.restart_args
        command = self.options.command
        args = tuple(added(command, args)[len(command) :])
        if args and not past.announced.resume_args:
            with self.launcher.signals.interrupting():
                path, host = missing_path(args, self.plan)
            if path:
                return missing_sentence(path, host)
        self.past = past._replace(resume_args=args)
        is_told = is_known(self.plan, past.announced) or not past.made_steps
        return "" if is_told else anew_sentence("the script begins")

    def announcement_at_end(self, outcome: Outcome) -> Announcement:
        """The job's announcement, with the arguments that resume it from here on."""
        announced = self.past.announced
        args, used = self.options.restart_args, announced.resume_args or self.past.resume_args
        if not args or used or outcome.code in (DONE, BAD_INPUT):
            return announced._replace(resume_args=announced.resume_args or args)
        try:
            with self.launcher.signals.interrupting():
                path, _ = missing_path(args, self.plan)
        except (JobFailed, UserError, OSError, KeyboardInterrupt):
            return announced
        return announced if path else announced._replace(resume_args=args)

    def _plan_again(self) -> Plan:
        """The plan for the hosts that are listed and usable after a pause.

        If the list has an error, the hosts of the latest attempt stay listed. Raises KeyboardInterrupt if the
        user stops the job meanwhile, and UserError or JobFailed if there is no plan.
        """
        self._heed_stop(self.pause_s)
        forget_addresses()
        with self.launcher.signals.interrupting():
            named = self.plan.past.named
            try:
                named = read_hosts(self.options, os.environ, is_first=False)
            except (UserError, JobFailed) as error:
                log.error(f"{error}\nThe hosts of before are used until the list is right.")
            if self._fits(named):
                return self.plan
        self.close()
        with self.launcher.signals.interrupting():
            past = self.past._replace(named=named)
            plan = make_plan(self.options, os.environ, past, self.launcher.logins)
        self._heed_stop()
        return plan

    def _fits(self, named: Hosts) -> bool:
        """Whether the agents that wait can make the next attempt, on these hosts."""
        plan, waiting, most = self.plan, self.waiting, self.past.announced.max_ranks
        if waiting is None or named != plan.past.named:
            return False
        if complaints := waiting.record.complaints:
            log.error(complaints)
        used, size = plan.request.hosts.hosts, plan.request.hosts.world_size
        is_doubted = len(used) > 1 and any(host.key in self.past.doubts for host in used)
        return not (complaints or is_doubted or size > (most or size))

    def _heed_stop(self, within_s: float = 0.0) -> None:
        """Raise KeyboardInterrupt if a signal requests a stop, now or in `within_s`."""
        signals, until = self.launcher.signals, time.monotonic() + within_s
        while self.waiting is not None and not signals.has_stop() and time.monotonic() < until:
            self.waiting.wait(until)  # viewers may ask
        if signals.has_stop(until - time.monotonic()):
            raise KeyboardInterrupt


def _failed_start(error: Exception) -> Outcome:
    """The outcome of a restart that could not begin. The job has started before, and may again."""
    if is_preempted(os.environ):
        return Outcome(STOPPED, PREEMPTED)
    return outcome_of(error)._replace(code=FAILED)


_INTERRUPTED = Outcome(INTERRUPTED, "interrupted before a restart.")
_STOPPED = Outcome(STOPPED, "stopped on request.")
