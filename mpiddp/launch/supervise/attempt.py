"""One attempt at a job: a control channel, one mpirun, and the verdict.

A job has succeeded when every rank has reported success. mpirun's exit code counts only if no rank has
reported: it is 0 after a killed daemon or a cut link, and 255 or 143 whatever the script returned.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.probe import with_own_folder
from mpiddp.launch import log
from mpiddp.launch.starters.command import RankStarter, Request
from mpiddp.launch.starters.openmpi import needs_own_session
from mpiddp.launch.starters.table import compose
from mpiddp.launch.supervise.awake_clock import AwakeClock
from mpiddp.launch.supervise.control_server import ControlServer, Message
from mpiddp.launch.supervise.exchange import Exchange
from mpiddp.launch.supervise.growing import HostWatch
from mpiddp.launch.supervise.job_state import NOTHING_ANNOUNCED, Announcement, JobState
from mpiddp.launch.supervise.limits import Limits
from mpiddp.launch.supervise.output import Shown
from mpiddp.launch.supervise.signals import SignalQueue
from mpiddp.launch.supervise.supervisor import MpirunEnd, Supervisor
from mpiddp.paths import cause_of
from mpiddp.protocol.variables import JOB, OUTPUT, SECRET


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first, its own name of its host, and its error, "" if it has reported none."""

    rank: int
    host: str
    error: str


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code, the sentence that explains it, and how the job resumes.

    `first` is None unless a rank is known to be the first that failed.
    `stop_was_requested`: by the user; with `is_at_once`, without a save. `grows`: by this launcher, to
    restart on more hosts. The user's request takes precedence.
    """

    code: int
    sentence: str = ""
    announcement: Announcement = NOTHING_ANNOUNCED
    made_steps: bool = False
    stop_was_requested: bool = False
    first: FirstFailure | None = None
    is_at_once: bool = False
    grows: bool = False

    @property
    def resumes(self) -> bool:
        """Whether the same command resumes the job."""
        return self.code == STOPPED or (
            self.code == INTERRUPTED and bool(self.announcement.resume_args)
        )


def attempt(
    starter: RankStarter,
    request: Request,
    limits: Limits,
    signals: SignalQueue,
    shown: Shown,
    exchange: Exchange | None = None,
    watch: HostWatch | None = None,
) -> Outcome:
    """Run the job to its end, and leave no process of it on any host that can be reached.

    Args:
        signals: stop requests.
        shown: the ranks whose output is shown.
        exchange: of the function that every rank runs, if the job is no script.
        watch: looks for hosts; if it finds some, the job stops to restart on them.

    Raises:
        UserError: mpirun cannot be started with this request.
        JobFailed: it cannot be started, because a machine failed.
    """
    hosts = request.names_of_ranks
    state = JobState(hosts)
    job = os.urandom(8).hex()
    clock = AwakeClock()
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        is_local = all(is_this_host(name) for name in hosts)
        # A container may have a /tmp of its own, without this launcher's Unix socket.
        has_own_socket = is_local and not starter.kind.has_scheduler and not request.is_command
        address = None if has_own_socket else request.network.control_address
        server = ControlServer(address, len(hosts), selector, clock.now)
        stack.enter_context(closing(server))
        settings = {JOB: job, **server.settings, OUTPUT: shown.ranks}
        if exchange is not None:
            exchange.begin(server.settings[SECRET], len(hosts))
        request = replace(request, variables={**request.variables, **settings})
        supervisor = Supervisor(
            selector,
            server,
            state,
            limits,
            clock,
            shown,
            watch=watch,
            runs_command=request.is_command,
            exchange=exchange,
        )
        has_session = needs_own_session(starter, request)
        has_files = bool(compose(starter, request).files)
        with _private_folder(needed=has_session or has_files) as folder:
            command = compose(starter, replace(request, scratch=folder))
            with _files_of_mpirun():
                command.write_files()
            env = {**with_own_folder(starter.program, os.environ), **command.settings}
            if has_session:
                env[starter.kind.session_folder] = folder
            end = supervisor.run(command.argv, env, signals, starter.kind.stop_signal)
    outcome = _outcome_by_ranks(starter, end, state, supervisor.verdict)
    state.remove_error_files()
    outcome = replace(
        outcome,
        announcement=state.announcement,
        made_steps=bool(state.steps),
        stop_was_requested=end.interrupted,
        is_at_once=end.is_at_once,
        grows=end.grows and not end.interrupted,
    )
    if outcome.code not in (DONE, BAD_INPUT, STOPPED) and not starter.kind.has_scheduler:
        from mpiddp.launch.orphans import kill_orphans

        silent = state.silent_hosts()
        left = [host for host in request.hosts.hosts if host.name not in silent]
        kill_orphans(left, job, request.job[0], log.info, request.hosts.transport)
    return outcome


def _outcome_by_ranks(
    starter: RankStarter, end: MpirunEnd, state: JobState, verdict: str
) -> Outcome:
    """The verdict by the ranks' messages. mpirun's exit code counts only if no rank has reported."""
    if state.all_stopped:
        return Outcome(STOPPED, "stopped on request.")
    if verdict:
        return Outcome(FAILED, verdict)
    if end.failed_stopping and (first := state.first_failure()) and _has_reason(first, state):
        return _outcome_of_failure(starter, end, state, first)
    if end.interrupted and not (state.all_done and state.supports_stop):
        return Outcome(INTERRUPTED, _interruption(end))
    if state.all_done:
        return _outcome_after_success(starter, end)
    if end.was_killed:
        return Outcome(FAILED, f"the job failed: {_cause(starter, end.code)}.")
    first = state.first_failure()
    if first is None:
        if end.code in (DONE, BAD_INPUT, STOPPED) and not state.started:
            return _outcome_without_ranks(end)
        return Outcome(FAILED, f"the job failed: {_cause(starter, end.code)}.")
    return _outcome_of_failure(starter, end, state, first)


def _outcome_after_success(starter: RankStarter, end: MpirunEnd) -> Outcome:
    """The verdict after every rank has reported success. Only native code still ran then.

    Open MPI's exit code proves that a rank was killed by a signal. The others' may have another cause.
    """
    if end.code == DONE or end.was_ended:
        return Outcome(DONE)
    if name := _signal(starter, end.code):
        return Outcome(
            FAILED, f"all ranks finished, but one was killed by {name} while its process ended."
        )
    return Outcome(DONE, f"all ranks finished, but {_cause(starter, end.code)} afterwards.")


def _outcome_of_failure(
    starter: RankStarter, end: MpirunEnd, state: JobState, first: Message
) -> Outcome:
    error = str(first.facts.get("error", ""))
    # A verdict may name another rank.
    is_verdict = first.facts.get("is_verdict", False)
    failure = None if is_verdict else FirstFailure(first.rank, state.host_of(first.rank), error)
    if first.kind == "failed" and first.facts["code"] in (BAD_INPUT, STOPPED):
        return Outcome(first.facts["code"], state.unprinted_error(first), first=failure)
    return Outcome(FAILED, state.sentence(first, _signal(starter, end.code)), first=failure)


def _has_reason(first: Message, state: JobState) -> bool:
    """Whether a rank failed while it saved and stopped, rather than being ended by the request."""
    if first.kind != "failed" or first.rank not in state.supports_stop:
        return False
    return bool(first.facts["error"]) or first.facts["code"] == BAD_INPUT


def _interruption(end: MpirunEnd) -> str:
    if end.limit:
        return f"interrupted: {end.limit}; the job was killed."
    return "interrupted: the job was stopped."


def _outcome_without_ranks(end: MpirunEnd) -> Outcome:
    """The verdict if mpirun ended without a failure but no rank reported, as ranks that refuse may not."""
    if end.code == DONE:
        return Outcome(FAILED, "the job failed: mpirun ended, but no rank ever reported.")
    return Outcome(end.code)


def _cause(starter: RankStarter, code: int) -> str:
    if code < 0:
        return f"{starter.program.name} was killed by {_signal_name(-code)}"
    if name := _signal(starter, code):
        return f"a rank was killed by {name}"
    return f"{starter.program.name} ended with exit code {code}"


def _signal(starter: RankStarter, code: int) -> str | None:
    """The signal that killed a rank by mpirun's exit code, "" if none did; None if the code is ambiguous."""
    if not starter.kind.proves_signals:
        return None
    return _signal_name(code - 128) if code - 128 in signal.valid_signals() else ""


def _signal_name(number: int) -> str:
    """ "SIGKILL". Most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _private_folder(needed: bool) -> Iterator[str]:
    if not needed:
        yield "."
        return
    # Every mpirun splits ssh's arguments at blanks. (Importing tempfile would take 10 ms.)
    parent = os.environ.get("TMPDIR", "")
    if " " in parent or not os.access(parent, os.W_OK | os.X_OK):
        parent = "/tmp"
    folder = Path(parent).absolute() / f"mpiddp-{os.urandom(8).hex()}"
    with _files_of_mpirun():
        folder.mkdir(mode=0o700)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _files_of_mpirun() -> Iterator[None]:
    """Raise UserError or JobFailed if the body cannot write them."""
    try:
        yield
    except OSError as error:
        raise cause_of(error)(f"cannot write a file for mpirun: {error.strerror}.") from None
