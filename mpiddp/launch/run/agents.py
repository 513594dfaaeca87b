"""The agents of one mpirun: a Plan comes in, and the Agents that have started go out.

An agent outlives its script, so it may make several attempts. A restart on the same hosts then needs no
preflight, no new mpirun, and no new login.
"""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from mpiddp.errors import BAD_INPUT, DONE, STOPPED
from mpiddp.hosts import private
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.ssh import Logins
from mpiddp.launch.judge.events import Outcome, Record
from mpiddp.launch.plan.environment import Environment, of_mpirun, to_start
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.launch.run.control import Console, ControlServer, Exchange, SignalQueue, listen
from mpiddp.launch.run.handover import hand_over, sweep
from mpiddp.launch.run.log_folder import LogFolder
from mpiddp.launch.run.mpirun import MpirunProcess
from mpiddp.launch.run.output import JobOutput
from mpiddp.protocol import variables
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.orders import Orders
from mpiddp.text import for_these_hosts

STOP_AFTER = "--stop-after"  # a reason to stop
LEAST_SILENCE_S = 3.0  # a shorter silence is no sign: the kernel asks a host once a second


@dataclass(frozen=True)
class Launcher:
    """The parts of a launcher that all attempts of its job share."""

    signals: SignalQueue
    console: Console
    # When --stop-after is over, or a scheduler's limit is near, by time.monotonic().
    stop_at: float = float("inf")
    why_stop: str = ""
    exchange: Exchange | None = None  # under `mpiddp.spawn`, where the ranks run a function
    logs: LogFolder | None = None
    logins: Logins = field(default_factory=Logins)  # the preflight's, which mpirun's start closes
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())


@dataclass(eq=False)
class Agents:
    """The agents of one mpirun, which has started, and the launcher's connections to them."""

    launcher: Launcher
    plan: Plan
    server: ControlServer
    mpirun: MpirunProcess
    output: JobOutput
    opened: ExitStack  # closes all of these
    others: list[Host] = field(default_factory=list)  # all hosts but this one
    job: str = ""  # an id in the environment of all processes of the job
    private_name: str = ""  # under this name, the other hosts keep the private variables

    def clean_up(self, outcome: Outcome, record: Record) -> None:
        """Leave no process and no file of the job on any host that can be reached.

        `outcome` and `record` are those of the last attempt. Agents remove the private variables once all
        ranks have met, so an attempt that has ended before leaves them.
        """
        have_met = len(record.latest["joining"]) == record.world_size
        is_clean = have_met and outcome.code in (DONE, BAD_INPUT, STOPPED)
        with ExitStack() as stack:  # whatever one of them raises, the others follow
            if self.others and not is_clean:
                hosts = [host for host in self.others if host.name not in record.silent_hosts]
                started = record.latest["started"].values()
                outputs = [output for event in started for output in event.facts.get("outputs", ())]
                names = self.job, self.private_name
                stack.callback(sweep, self.plan.request, hosts, *names, outputs)
            stack.callback(self.opened.close)
            stack.callback(self.server.drop_all)
            stack.callback(self.output.settle, is_said=outcome.is_complete)


def orders_of(launcher: Launcher, plan: Plan, server: ControlServer) -> Orders:
    """The orders for the agents of `plan`, which are to connect to `server`."""
    options, announced = plan.options, plan.past.announced
    most = max(plan.request.hosts.world_size, plan.past.num_hosts)
    has_prefix = {"auto": most > 1, "always": True}.get(options.prefix, False)
    kept = {"global_batch_size": announced.global_batch_size, "world_size": announced.world_size}
    of_attempt = {
        variables.RUN_ID: launcher.run_id,
        variables.MAX_RESTARTS: str(options.max_restarts),
        variables.RESTART_COUNT: str(plan.past.attempts),
        variables.ANNOUNCED: json.dumps(kept) if announced.global_batch_size else "",
        variables.RUN_DIR: announced.run_dir,
    }
    umask = os.umask(0)
    os.umask(umask)
    return options.orders._replace(
        address=server.address,
        key=server.key,
        lost_s=server.lost_s,
        terminal=options.terminal._replace(has_prefix=has_prefix),
        holds=plan.holds,
        umask=umask,
        exported=tuple(plan.request.environment.chosen),
        variables={name: value for name, value in of_attempt.items() if value},
        args=plan.past.resume_args,
        hosts=for_these_hosts(" HOSTFILE").strip(),
    )


def start(launcher: Launcher, plan: Plan) -> Agents | Mapping[str, str]:
    """Start the agents of `plan`. If others do not reach a host, it returns a sentence for each one, see `hand_over`."""
    options, request = plan.options, plan.request
    world_size = request.hosts.world_size
    others = [host for host in request.hosts.hosts if not is_this_host(host.name)]
    job = os.urandom(8).hex()
    with ExitStack() as stack:
        folder = stack.enter_context(private.own_folder(os.environ))
        selector = stack.enter_context(TimedSelector())
        # A container may have a /tmp of its own, without this launcher's socket.
        has_path = not (others or options.image or options.job[0] == "--")
        where = folder / "control" if has_path else request.control_address
        server = ControlServer(
            listen(where), world_size, selector, lost_s=max(LEAST_SILENCE_S, options.lost_s)
        )
        stack.callback(server.close)
        orders = orders_of(launcher, plan, server)
        ours = {**request.environment.ours, variables.JOB: job, variables.ORDERS: orders.packed()}
        environment = request.environment._replace(ours=ours)
        shell = environment.shell
        private_name = private.new_name() if others else ""
        if private_name:
            stack.callback(private.remove, private_name)
            kept = environment.of_ranks
            environment = Environment(
                shell, ours=to_start({**kept, variables.PRIVATE: private_name})
            )
            shell = of_mpirun(shell, request.hosts.transport)
            with launcher.signals.interrupting():
                cut_off = hand_over(plan, server, private_name, kept, launcher.logins)
            if cut_off:
                return cut_off
            stack.push(
                lambda kind, *_: sweep(request, others, job, private_name, ()) if kind else None
            )
        if not launcher.logins.have_claims:
            launcher.logins.close()
        command = plan.starter.compose(request._replace(environment=environment), str(folder))
        mpirun = MpirunProcess(plan.starter, command, shell)
        stack.callback(mpirun.close)
        # The output of a detached job is kept without --log-dir, too.
        logs = launcher.logs if options.log_dir else None
        output = JobOutput(
            options,
            world_size,
            selector,
            mpirun.streams,
            logs,
            has_prefix=orders.terminal.has_prefix,
        )
        selector.register(launcher.signals, selectors.EVENT_READ, launcher.signals)
        if (viewers := launcher.console.listener) is not None:
            selector.register(viewers, selectors.EVENT_READ, viewers)
        return Agents(
            launcher, plan, server, mpirun, output, stack.pop_all(), others, job, private_name
        )
