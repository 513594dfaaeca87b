"""The agents of one mpirun, over the attempts that they make.

    agents = Agents.start(options, plan, known, ...)   # preflight's plan -> mpirun -> agents
    outcome = agents.attempt(...)                      # a failed one leaves the agents waiting
    agents.end(outcome)

An agent outlives its script. So a restart on the same hosts begins in the same agents: no preflight, no new
mpirun, and no new login.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.errors import BAD_INPUT, DONE, STOPPED
from mpiddp.hosts import private
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.ssh import Logins
from mpiddp.launch.attempt import Attempt
from mpiddp.launch.control import Console, ControlServer, Exchange, SignalQueue, listen
from mpiddp.launch.events import Announcement, Record, Stop
from mpiddp.launch.handover import gone, hand_over
from mpiddp.launch.mpirun import MpirunProcess, kill_orphans, private_folder
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.output import JobOutput
from mpiddp.launch.plan import Plan, search_once
from mpiddp.launch.variables import left_out, of_mpirun, take_private
from mpiddp.launch.verdict import Outcome, verdict
from mpiddp.protocol import variables as names
from mpiddp.protocol.server import TimedSelector


@dataclass(frozen=True)
class Launcher:
    """What a launcher has over all attempts of its job."""

    options: LaunchOptions
    signals: SignalQueue
    console: Console
    stop_at: float = float("inf")  # when --stop-after is over, in time.monotonic()'s seconds
    exchange: Exchange | None = None  # of the function that every rank runs, if it is no script
    log_dir: str | Path | None = None  # for the records of the attempts
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
        """Those of its ranks."""
        known = self.known
        announced = {"global_batch_size": known.global_batch_size, "world_size": known.world_size}
        return {
            names.RESTART_COUNT: str(self.number - 1),
            names.ANNOUNCED: json.dumps(announced) if known.global_batch_size else "",
            names.RUN_DIR: known.run_dir,
        }


class Agents:
    """The agents of one mpirun, which has started."""

    def __init__(self, launcher: Launcher, plan: Plan, turn: Turn) -> None:
        """Start them. Raises CutOff for hosts that the others do not reach."""
        self.launcher, self.plan, self._first = launcher, plan, turn
        options, request = launcher.options, plan.request
        hosts = request.names_of_ranks
        self._others = [host for host in request.hosts.hosts if not is_this_host(host.name)]
        has_scheduler, self._job = plan.starter.has_scheduler, os.urandom(8).hex()
        has_prefix = {"auto": len(hosts) > 1, "always": True}.get(options.prefix, False)
        own = {
            names.JOB: self._job,
            names.OUTPUT: options.log_ranks,
            names.TERMINAL: str(options.terminal._replace(has_prefix=has_prefix)),
            names.RUN_ID: launcher.run_id,
            names.MAX_RESTARTS: str(options.max_restarts),
            names.HOLDS: "1" if turn.holds else "",
            **turn.variables(),
        }
        with ExitStack() as stack:
            folder = stack.enter_context(private_folder(os.environ))
            selector = stack.enter_context(TimedSelector())
            # A container may have a /tmp of its own, without this launcher's socket.
            has_path = not (self._others or has_scheduler or options.job[0] == "--")
            where = folder / "control" if has_path else request.network.control_address
            self._server = ControlServer(listen(where), len(hosts), selector)
            stack.callback(lambda: self._server.close())
            given = {name: value for name, value in own.items() if value} | self._server.settings
            job, variables = (*request.job, *turn.known.resume_args), {**request.variables, **given}
            kept: dict[str, str] = {}
            self._kept = private.new_name() if self._others and not has_scheduler else ""
            if self._kept:
                stack.callback(private.remove, self._kept)
                kept = take_private(variables, options.variables)
                kept[names.LEFT_OUT] = ",".join([socket.gethostname(), *left_out(request)])
                variables[names.PRIVATE] = self._kept
                with launcher.signals.interrupting():
                    hand_over(request, self._server, self._kept, kept, launcher.logins)
            launcher.logins.close()
            request = request._replace(job=job, variables=variables)
            command = plan.starter.compose(request, str(folder))
            env = of_mpirun(os.environ, kept) if kept else os.environ
            self._mpirun = MpirunProcess(plan.starter, command, env)
            shown = {
                "has_prefix": has_prefix,
                "has_stamps": options.timestamps,
                "shows_end": options.verbose,
            }
            self._output = JobOutput(len(hosts), selector, *self._mpirun.streams, **shown)
            self._stack = stack.pop_all()
        self._latest: Attempt | None = None
        self._is_over = False  # mpirun has ended, and nothing of it is left

    @property
    def are_waiting(self) -> bool:
        """Whether they wait for the next attempt."""
        return self._latest is not None and self._latest.is_held

    @property
    def are_stopped(self) -> bool:
        """Whether the user has requested a stop of their last attempt, or since."""
        return self._latest is not None and self._latest.record.stop >= Stop.BY_USER

    @property
    def complaints(self) -> str:
        """What they have found wrong with their hosts since the failure."""
        held = self._latest.record.latest["held"].values() if self._latest else ()
        return "\n".join(dict.fromkeys(filter(None, (each.facts["error"] for each in held))))

    def attempt(self, turn: Turn) -> Outcome | None:
        """Make an attempt to its end; unless they wait then, no process of it is left that can be reached.

        None if they do not begin the attempt.
        """
        before = self._latest
        if before is not None:
            args = () if self._first.known.resume_args else turn.known.resume_args
            facts = {"variables": turn.variables(), "args": args, "holds": turn.holds}
            server = before.begin_again(**facts)
            if server is None:
                return None
            self._server = server
            before.record.close()
            self._output.begin_again()
        launcher, plan, options = self.launcher, self.plan, self.launcher.options
        if launcher.exchange is not None:
            launcher.exchange.begin(self._server)
        hosts, there = plan.request.names_of_ranks, {host.name for host in self._others}
        facts_of_record: dict[str, Any] = {
            "here": [rank for rank, host in enumerate(hosts) if host not in there],
            "attempt": turn.number,
            "hang_timeout_s": options.hang_timeout_s,
        }
        kept_in = launcher.log_dir
        kept_at = Path(kept_in, f"attempt_{turn.number}.jsonl") if kept_in is not None else None
        record = self._stack.enter_context(closing(Record(hosts, kept_at, **facts_of_record)))
        is_over_ssh = bool(self._others) and not plan.starter.has_scheduler
        self._latest = attempt = Attempt(
            options,
            record,
            self._server,
            self._mpirun,
            self._output,
            launcher.signals,
            launcher.console,
            launcher.stop_at,
            launcher.exchange,
            partial(search_once, options, plan, [*turn.avoided]) if turn.grows else None,
            partial(gone, plan.request) if is_over_ssh else None,
            turn.holds,
        )
        if before is not None and before.record.stop is Stop.BY_USER:  # meanwhile
            attempt.request_stop(before.record.fact("stop", "reason"))
        attempt.run()
        outcome = verdict(record)
        if not attempt.is_held:
            self._clean_up(outcome)
        return outcome

    def end(self, outcome: Outcome) -> None:
        """End them, if they have not ended. `outcome` is that of their last attempt."""
        if self._latest is not None and not self._is_over:
            self._latest.end()
            self._clean_up(outcome)

    def _clean_up(self, outcome: Outcome) -> None:
        """mpirun has ended: leave no process of the job on any host that can be reached."""
        assert self._latest is not None
        self._is_over = True
        self._output.settle(is_said=outcome.is_complete, log_dir=self.launcher.options.log_dir)
        self._stack.close()
        request, is_over_ssh = self.plan.request, not self.plan.starter.has_scheduler
        if self._others and outcome.code not in (DONE, BAD_INPUT, STOPPED) and is_over_ssh:
            silent = self._latest.record.silent_hosts
            left: list[Host] = [host for host in self._others if host.name not in silent]
            kill_orphans(left, self._job, self._kept, request.job[0], request.hosts.transport)
