"""The agents of one mpirun, and the attempts that they make.

    agents = start(launcher, plan, turn)    # preflight's plan -> mpirun -> agents
    attempt = Attempt(agents, turn)
    outcome = attempt.run()                 # a failed one may leave the agents waiting
    agents.begin_again(next_turn)           # either for another attempt,
    attempt.end()                           # or they end

An agent outlives its script. So a restart on the same hosts begins in the same agents: no preflight, no new
mpirun, and no new login.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from mpiddp.errors import BAD_INPUT, DONE, STOPPED
from mpiddp.hosts import private
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.scratch import private_folder
from mpiddp.hosts.ssh import Logins
from mpiddp.launch.judge.events import Announcement
from mpiddp.launch.judge.outcome import Outcome
from mpiddp.launch.plan.environment import forwarded, of_mpirun, to_start
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.launch.run.control import Console, ControlServer, Exchange, SignalQueue, listen
from mpiddp.launch.run.handover import hand_over, sweep
from mpiddp.launch.run.log_folder import LogFolder
from mpiddp.launch.run.mpirun import MpirunProcess
from mpiddp.launch.run.output import JobOutput
from mpiddp.protocol import variables as names
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.server import Event
from mpiddp.protocol.terminal import Manners

AGAIN_S = 5.0  # all agents to begin again
STOP_AFTER = "--stop-after"  # a reason to stop
LEAST_SILENCE_S = 3.0  # that means anything: the kernel asks a host once a second


@dataclass(frozen=True)
class Launcher:
    """What a launcher has over all attempts of its job."""

    signals: SignalQueue
    console: Console
    # When to stop, in time.monotonic()'s seconds: --stop-after is over, or a scheduler's limit is near.
    stop_at: float = float("inf")
    why_stop: str = ""
    exchange: Exchange | None = None  # of the function that every rank runs, if it is no script
    logs: LogFolder | None = None
    logins: Logins = field(default_factory=Logins)  # of the preflight, until mpirun starts
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())


@dataclass(frozen=True)
class Turn:
    """An attempt as the job numbers it, and what the attempts before it have announced."""

    number: int
    known: Announcement
    holds: bool  # its agents may make the next attempt
    grows: bool
    avoided: tuple[str, ...] = ()  # hosts that are not to join

    def variables(self) -> dict[str, str]:
        """The environment variables of its ranks."""
        size = self.known.global_batch_size
        announced = {"global_batch_size": size, "world_size": self.known.world_size}
        return {
            names.RESTART_COUNT: str(self.number - 1),
            names.ANNOUNCED: json.dumps(announced) if size else "",
            names.RUN_DIR: self.known.run_dir,
        }


@dataclass(eq=False)
class Agents:
    """The agents of one mpirun, which has started, and the launcher's ends of what leads to them."""

    launcher: Launcher
    plan: Plan
    server: ControlServer
    mpirun: MpirunProcess
    output: JobOutput
    opened: ExitStack  # closes all of these
    first: Turn
    others: list[Host] = field(default_factory=list)  # the hosts beside this one
    job: str = ""  # marks all processes of the job, in their environment
    kept: str = ""  # under this name, the other hosts keep what is private

    @property
    def has_logged_in(self) -> bool:
        """Whether their mpirun reaches other hosts, over logins and not by a scheduler."""
        return bool(self.others) and not self.plan.starter.has_scheduler

    def wait(self, until: float = float("inf")) -> tuple[list[Event], list[int]]:
        """Wait for sockets, signals and timers, at most until `until`, and copy output.

        Returns the events, and the stop signals, whose sender may have reacted to them.
        """
        messages, signals = list[Event](), self.launcher.signals
        ready = self.server.selector.ready(until)
        for data in ready:
            if data not in (self.output, signals):
                messages += self.server.receive(data)
        for message in messages:
            if message.kind == "terminal" and message.rank == 0:
                self.output.follow(Manners(message.facts["echo"], message.facts["lines"]))
        if (
            self.output in ready
        ):  # last: the terminal's echo is switched off before a password is asked for
            self.output.copy()
        numbers = signals.receive() if signals in ready else []
        if signals.has_resized:
            signals.has_resized = False
            if (terminal := self.plan.options.terminal).files:
                self.server.send_all("size", columns=terminal.columns, rows=terminal.rows)
        return messages, numbers

    def begin_again(self, turn: Turn) -> bool:
        """Let the agents that wait begin the next attempt, with its server.

        Returns False if some agents do not come, or if the user stops the job meanwhile.
        """
        server, deadline = self.server, time.monotonic()
        self.wait(deadline)  # an agent may have been killed meanwhile
        if len(server.connected) < server.world_size:
            return False
        server.stop_listening()
        args = () if self.first.known.resume_args else turn.known.resume_args
        facts = {"variables": turn.variables(), "args": args, "holds": turn.holds}
        server.ask(server.connected, "again", agents=True, **facts)
        deadline += AGAIN_S
        while server.has_members and self.mpirun.code is None and time.monotonic() < deadline:
            self.wait(deadline)
            for reaction in server.selector.due():
                reaction()
        is_stopped = self.launcher.signals.has_stop()
        if is_stopped or server.has_members or self.mpirun.code is not None:
            return False
        self.server = server.successor()
        self.output.begin_again()
        return True

    def clean_up(self, outcome: Outcome, silent: Collection[str], outputs: Sequence[str]) -> None:
        """mpirun has ended: leave no process of the job on any host that can be reached.

        `outcome` is that of their last attempt, in which the `silent` hosts have stopped answering. Its
        ranks write to `outputs`.
        """
        self.output.settle(is_said=outcome.is_complete)
        self.server.drop_all()
        self.opened.close()
        if self.has_logged_in and outcome.code not in (DONE, BAD_INPUT, STOPPED):
            left = [host for host in self.others if host.name not in silent]
            sweep(self.plan.request, left, self.job, self.kept, outputs)


def start(launcher: Launcher, plan: Plan, turn: Turn) -> Agents:
    """Start the agents of `plan`. Raises CutOff for hosts that the others do not reach."""
    options, request = plan.options, plan.request
    hosts, has_scheduler = request.names_of_ranks, plan.starter.has_scheduler
    has_prefix = {"auto": len(hosts) > 1, "always": True}.get(options.prefix, False)
    others = [host for host in request.hosts.hosts if not is_this_host(host.name)]
    job = os.urandom(8).hex()
    settings = {
        names.JOB: job,
        names.OUTPUT: options.log_ranks,
        names.TERMINAL: json.dumps(options.terminal._replace(has_prefix=has_prefix)),
        names.RUN_ID: launcher.run_id,
        names.MAX_RESTARTS: str(options.max_restarts),
        names.HOLDS: "1" if turn.holds else "",
        names.FAILED_GRACE: str(options.failed_grace_s),
        **turn.variables(),
    }
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder(os.environ))
        selector = stack.enter_context(TimedSelector())
        # A container may have a /tmp of its own, without this launcher's socket.
        has_path = not (others or has_scheduler or options.job[0] == "--")
        where = folder / "control" if has_path else request.network.control_address
        server = ControlServer(
            listen(where), len(hosts), selector, lost_s=max(LEAST_SILENCE_S, options.lost_s)
        )
        stack.callback(server.close)
        settings = {name: value for name, value in settings.items() if value} | server.settings
        variables, env = {**request.variables, **settings}, dict(os.environ)
        kept = private.new_name() if others and not has_scheduler else ""
        if kept:
            stack.callback(private.remove, kept)
            everything = {**forwarded(env, options.kept_home), **variables}
            variables = to_start({**everything, names.PRIVATE: kept})
            env = of_mpirun(env, request.hosts.transport)
            with launcher.signals.interrupting():
                hand_over(plan, server, kept, everything, launcher.logins)
        launcher.logins.close()
        command_of_rank = (*request.job, *turn.known.resume_args)
        request = request._replace(job=command_of_rank, variables=variables)
        command = plan.starter.compose(request, str(folder))
        env = {name: env[name] for name in env.keys() - options.kept_home}
        mpirun = MpirunProcess(plan.starter, command, env)
        # What a detached job prints is kept without --log-dir.
        logs = launcher.logs if options.log_dir else None
        output = JobOutput(
            options, len(hosts), selector, mpirun.streams, logs, has_prefix=has_prefix
        )
        selector.register(launcher.signals, selectors.EVENT_READ, launcher.signals)
        if (viewers := launcher.console.listener) is not None:
            selector.register(viewers, selectors.EVENT_READ, viewers)
        ends = (server, mpirun, output, stack.pop_all())
        return Agents(launcher, plan, *ends, turn, others, job, kept)
