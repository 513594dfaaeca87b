"""The ranks of a job join under any launcher, agree over one channel, and leave together.

    with join(world) as coordinator:
        coordinator.all_gather_json(socket.gethostname(), timeout_s=60)

`mpiddp run` joins before a script's first line. Elsewhere a process group, or `mpiddp.Checkpoints`, joins.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from weakref import WeakKeyDictionary

from mpiddp.errors import FAILED, JobFailed
from mpiddp.protocol.variables import ERROR_FILE, OBSERVER, PLACEMENT, REPORT, VERBOSE
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Refused, ending_of
from mpiddp.runtime.job.failure_watch import FailureWatch
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.launcher.connected import script_session
from mpiddp.runtime.log import log_to_console
from mpiddp.runtime.rendezvous.meet import meet, meet_as_child
from mpiddp.runtime.start.process import export, limit_threads
from mpiddp.world import World, is_joined


@contextlib.contextmanager
def join(
    world: World | None = None, *, keep_mpi: bool = False, uses_torch: bool = True
) -> Iterator[Coordinator]:
    """Join the ranks. They leave together at the end of the body.

    Then os.environ holds the variables that scripts find under torchrun, see
    `mpiddp.runtime.start.process`. A child process of a rank joins the children of the other ranks.

    Args:
        world: the world of this process; by default read from the environment.
        keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.
        uses_torch: False for a process that only starts a command. Then a process beside rank 0 serves
            torch's store for the commands.

    Raises:
        UserError: inconsistent variables of launchers, a foreign MPI.
        JobFailed: ranks that do not join.
        SystemExit: code 2, on every rank, after rank 0 has printed the reason.
    """
    session = script_session()
    if session.watch is not None:  # `mpiddp run` has joined, and its script calls process_group()
        assert session.coordinator is not None
        yield session.coordinator
        return
    if session.coordinator is None:
        world = world or World.from_env()
        log_to_console(world.rank)
        if is_joined(os.environ):
            session.coordinator = meet_as_child(world, session)
        else:
            session.coordinator = _meet(world, session, keep_mpi=keep_mpi, uses_torch=uses_torch)
    with _staying(session, session.coordinator, keep_mpi):
        yield session.coordinator


def _meet(world: World, session: Session, *, keep_mpi: bool, uses_torch: bool) -> Coordinator:
    """Meet the other ranks, and prepare this process for what it runs."""
    coordinator, result = meet(world, session, keep_mpi=keep_mpi, uses_torch=uses_torch)
    if world.local_world_size is None and (threads := limit_threads(coordinator.world)):
        _set_threads(threads)
    export(result, coordinator.channel)
    if session.launcher is not None and "torch" in sys.modules:
        _report_optimizer_steps(session.optimizer_stepped)
    if observer := os.environ.get(OBSERVER):
        import_module(observer).observe()
    session.send("error_file", path=os.environ.get(ERROR_FILE, ""))
    if any(os.environ.get(name) for name in (PLACEMENT, REPORT, VERBOSE)):
        from mpiddp.runtime.rendezvous.placement import check_placement

        check_placement(coordinator, result, uses_gpus=uses_torch)
    return coordinator


def _set_threads(threads: int) -> None:
    """Set the threads of torch, if this process uses it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def _report_optimizer_steps(report: Callable[[int], None]) -> None:
    """Let torch call `report` after each step of any optimizer, with the number of steps of that one.

    They are the steps of a script that tells none. It is a public hook of torch, and costs a microsecond a
    step. A compiled optimizer reports none. A later optimizer, of the next fold for example, goes on from the
    steps of the others.
    """
    import torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
    newest = 0

    def count(optimizer: Optimizer, args: object, kwargs: object) -> None:
        nonlocal newest
        if torch.compiler.is_compiling():
            return
        # Two optimizers of one step, as of a GAN, count it once.
        counts[optimizer] = steps = counts.get(optimizer, max(0, newest - 1)) + 1
        newest = max(newest, steps)
        report(steps)

    register_optimizer_step_post_hook(count)


@contextlib.contextmanager
def _staying(session: Session, coordinator: Coordinator, keep_mpi: bool) -> Iterator[None]:
    """End with the other ranks: this process when one of them fails, and all of them when this one does."""
    watch = _watch(session, coordinator)
    try:
        yield
    except BaseException as error:
        if session.is_of_this_process:
            _end_with(error, session, coordinator, watch, keep_mpi)
        raise
    else:
        if session.is_of_this_process:
            _leave(session, coordinator, watch, keep_mpi)
    finally:
        session.watch, session.earlier_watch = None, watch


def _watch(session: Session, coordinator: Coordinator) -> FailureWatch:
    if session.earlier_watch is not None:  # the script has caught its error
        session.earlier_watch.stop()
    session.watch = FailureWatch(
        coordinator,
        session.stop,
        has_launcher=session.launcher is not None,
        exit_now=session.exit_now,
    )
    session.watch.start()
    return session.watch


def _end_with(
    error: BaseException,
    session: Session,
    coordinator: Coordinator,
    watch: FailureWatch,
    keep_mpi: bool,
) -> None:
    """End the job after an error of the body.

    Raises SystemExit instead of a UserError or a JobFailed, after printing or reporting it.
    """
    if isinstance(error, Refused):
        watch.stop()
        return
    ending = ending_of(error, has_stopped=session.stop.has_stopped)
    if not ending.is_failure:  # many scripts end with sys.exit(main())
        _leave(session, coordinator, watch, keep_mpi)
        return
    session.claim_first_failure()
    if not ending.traceback:
        session.report(ending)
        watch.fail(ending)
        if not isinstance(error, SystemExit):
            raise SystemExit(ending.code) from None
        return
    if isinstance(error, Exception):
        watch.leave()


def _leave(session: Session, coordinator: Coordinator, watch: FailureWatch, keep_mpi: bool) -> None:
    """Leave after a body that succeeded. After an error there is no rank to wait for.

    Raises SystemExit, after printing or reporting it, if a last save has failed.
    """
    try:
        session.finish()
    except JobFailed as error:
        session.claim_first_failure()
        session.report(ending_of(error))
        watch.fail(ending_of(error))
        raise SystemExit(FAILED) from None
    if coordinator.channel is not None:
        session.stop.propose_step(coordinator.channel, 0)
    if session.stop.has_stopped:
        session.stop_is_saved()
    # The first rank that exits with a code other than 0 ends the others, which may still save.
    coordinator.leave(waits=session.stop.has_stopped)
    watch.stop()
    if keep_mpi:
        from mpiddp.runtime.rendezvous.mpi import finalize_mpi

        finalize_mpi()


def join_steps(session: Session) -> None:
    """Let the script of a rank's command agree with the other scripts on the step of a stop.

    A script that calls should_stop() and forms its process group by itself has not joined. This waits for no
    other rank.
    """
    world = World.from_env()
    session.coordinator = meet_as_child(world, session, waits=False)
    session.stop.is_alone = world.world_size == 1
    atexit.register(
        _leave_steps, session, session.coordinator, _watch(session, session.coordinator)
    )


def _leave_steps(session: Session, coordinator: Coordinator, watch: FailureWatch) -> None:
    if session.is_of_this_process:
        if coordinator.channel is not None:
            session.stop.propose_step(coordinator.channel, 0)
        watch.stop()
