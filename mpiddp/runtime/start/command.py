"""`mpiddp run -- COMMAND`: one rank of a job runs any command, after all ranks have joined.

This process joins like a script's, and keeps the store. The command is a child process: it finds torchrun's
variables, and a script within it may form a process group or call mpiddp. A container thus needs no MPI.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Mapping, Sequence

from mpiddp.errors import DONE, STOPPED
from mpiddp.paths import cause_of, check_program
from mpiddp.protocol.variables import (
    ADDRESS,
    AGENT_STORE,
    CHANNEL,
    CHANNEL_SECRET,
    GPUS,
    PLACEMENT,
    REPORT,
    RUN_ID,
    SCRIPT_SECRET,
)
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import CommandFailed, ending_of_command
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.start.guardian import Guardian
from mpiddp.text import escaped
from mpiddp.world import RANK_SOURCES

# The variables that an MPI sets for its ranks. A command that starts MPI would join this job with them.
_OF_MPI = (
    *("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "HYDI_", "HYDRA_"),
    *("MPI_LOCAL", "MPIR_CVAR_", "MV2_COMM_WORLD_", "I_MPI_", "JSM_", "PALS_", "FLUX_TASK_"),
    *(name for source in RANK_SOURCES if source.speaks_mpi for name in source.variables),
)
_LAUNCHER_S = 2.0
_REQUESTS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})


def run_command(command: Sequence[str], session: Session, coordinator: Coordinator) -> int:
    """Run the command as this rank, and return its exit code. All ranks must call this.

    Raises:
        UserError, JobFailed: the command cannot be started.
        CommandFailed: the command has failed, with its exit code.
    """
    env = command_environment(os.environ, has_launcher=session.launcher is not None)
    with contextlib.ExitStack() as started:
        with coordinator.all_or_none():
            guardian = _start(command, env, keeps_stdin=coordinator.world.rank == 0)
            session.before_exit(guardian.end)
            session.stop.on_request(guardian.request_stop)
            started.callback(guardian.end)
        code = guardian.wait()
    session.wait_if_ending()
    status = _end_as(code, session, guardian)
    if session.launcher is not None:
        # Nothing of this rank is left that could fail, and at the first exit code other than 0
        # some MPIs kill the other ranks at once.
        session.launcher.done()
    return status


def command_environment(env: Mapping[str, str], *, has_launcher: bool) -> dict[str, str]:
    """The variables of the command of a rank that has joined, from those of the rank."""
    # The command may start a torchrun with other ranks. This process has applied GPUS.
    left_out = (*_OF_MPI, GPUS, PLACEMENT, REPORT)
    found = {name: value for name, value in env.items() if not name.startswith(left_out)}
    found[AGENT_STORE] = "True"  # this process is the store, not the command of rank 0
    found.setdefault(RUN_ID, found["TORCHELASTIC_RUN_ID"])  # under torchrun
    if has_launcher:  # to which the first process that uses mpiddp reports, as the rank's script
        found[ADDRESS] = found.pop(CHANNEL)
        found[SCRIPT_SECRET] = found.pop(CHANNEL_SECRET)
    return found


def _start(command: Sequence[str], env: Mapping[str, str], *, keeps_stdin: bool) -> Guardian:
    check_program(command[0], env.get("PATH"))
    try:
        return Guardian(command, env, keeps_stdin=keeps_stdin)
    except OSError as error:
        hint = " A script begins with a line such as #!/bin/sh." * (error.errno == errno.ENOEXEC)
        sentence = f"{escaped(command[0])} cannot be started: {error.strerror}.{hint}"
        raise cause_of(error)(sentence) from None


def _end_as(code: int | None, session: Session, guardian: Guardian) -> int:
    """End this rank as its command has ended: with its exit code, or 128 + N after signal N.

    After a request to stop, the other ranks' commands may still save, so this end is no failure.

    Raises:
        SystemExit: the command has failed.
    """
    ending = ending_of_command(-signal.SIGKILL if code is None else code)
    status = ending.code
    ends = {STOPPED, *(128 + each for each in (signal.SIGTERM, *guardian.passed))}
    if status in ends and _is_requested(session, guardian):
        if status == STOPPED:
            session.stop.stopped()
        session.stop.has_stopped = True  # the ranks leave together
        return status
    if ending.is_failure:
        raise CommandFailed(status, ending.sentence)
    return DONE


def _is_requested(session: Session, guardian: Guardian) -> bool:
    """Whether a stop has been requested. An MPI sends SIGTERM too, when another rank has failed."""
    was_signalled = bool(guardian.passed & _REQUESTS)
    if session.launcher is None:
        return was_signalled
    # A signal to every process of the job may end the command before the launcher has sent its request.
    return session.launcher.stopping.wait(_LAUNCHER_S if was_signalled else 0.0)
