"""The ranks of a job join under any launcher, share one store, and leave together.

Everything that needs all ranks at once, a process group as well as a refusal, begins with `join`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace

from mpiddp.errors import FAILED, JobFailed, UserError
from mpiddp.protocol.variables import ERROR_FILE, MAX_TIMEOUT_S, RUN_ID, TIMEOUT
from mpiddp.runtime.coordinator import LEAVE_TIMEOUT_S, Coordinator
from mpiddp.runtime.ending import Ending, Refused, ending_of
from mpiddp.runtime.failure_watch import FailureWatch
from mpiddp.runtime.log import log_to_console
from mpiddp.runtime.name_service import no_dns
from mpiddp.runtime.process_setup import limit_threads
from mpiddp.runtime.rendezvous import finalize_mpi, rendezvous_over_mpi
from mpiddp.runtime.script_environment import export
from mpiddp.runtime.session import Session, current
from mpiddp.runtime.startup_checks import check_placement
from mpiddp.text import parse_whole, shown
from mpiddp.world import World, is_joined

_JOIN_TIMEOUT_S = 60.0
_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them


@contextlib.contextmanager
def join(
    world: World | None = None, *, keep_mpi: bool = False, for_command: bool = False
) -> Iterator[Coordinator]:
    """Join the ranks. They share one store, and leave together at the end of the body.

    Then os.environ holds the variables that scripts find under torchrun, see
    `mpiddp.runtime.script_environment`. A child process of a rank joins the children of the other ranks.

    Args:
        world: the world of this process; by default read from the environment.
        keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.
        for_command: this process only starts a command, so it does without torch if it can. Then a process
            beside rank 0 serves torch's store for the commands.

    Raises:
        UserError: inconsistent variables of launchers, a foreign MPI.
        JobFailed: ranks that do not join.
        SystemExit: code 2, on every rank, after rank 0 has printed the reason.
    """
    session = current()
    if session.watch is not None:  # `mpiddp run` has joined, and its script calls process_group()
        assert session.coordinator is not None
        yield session.coordinator
        return
    if session.coordinator is None:
        world = world or World.from_env()
        log_to_console(world.rank)
        session.coordinator = _join(session, world, keep_mpi=keep_mpi, for_command=for_command)
    coordinator = session.coordinator
    if session.earlier_watch is not None:  # the script has caught its error
        session.earlier_watch.stop()
    watch = FailureWatch(
        coordinator,
        session.stop,
        has_launcher=session.channel is not None,
        exit_now=session.exit_now,
    )
    session.watch = watch
    watch.start()
    try:
        yield coordinator
    except BaseException as error:
        if session.is_of_this_process:
            _end_with(error, session, coordinator, watch, keep_mpi)
        raise
    else:
        if session.is_of_this_process:
            _leave(session, coordinator, watch, keep_mpi)
    finally:
        session.watch, session.earlier_watch = None, watch


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
    if session.channel is not None:  # the report to the launcher contains this
        session.channel.is_first = coordinator.claim_first_failure()
    if not ending.traceback:
        _fail(ending, session, watch)
        if not isinstance(error, SystemExit):
            raise SystemExit(ending.code) from None
        return
    watch.leave()
    if isinstance(error, Exception) and coordinator.claim_first_failure():
        watch.end_the_job(FAILED)  # even if the script catches the error outside its `with`


def _fail(ending: Ending, session: Session, watch: FailureWatch) -> None:
    if session.channel is not None:
        session.channel.failed(ending)
    watch.fail(ending)


def _leave(session: Session, coordinator: Coordinator, watch: FailureWatch, keep_mpi: bool) -> None:
    """Leave after a body that succeeded. After an error there is no rank to wait for.

    Raises SystemExit, after printing or reporting it, if a last save has failed.
    """
    try:
        session.finish()
    except JobFailed as error:
        if session.channel is not None:
            session.channel.is_first = coordinator.claim_first_failure()
        _fail(ending_of(error), session, watch)
        raise SystemExit(FAILED) from None
    with contextlib.suppress(RuntimeError):  # rank 0 may have ended, and its store with it
        stop = session.stop
        stop.propose_step(coordinator.values, coordinator.world.rank, 0)
        coordinator.arrive("end")
        if stop.has_stopped:
            session.stop_is_saved()
            # The first rank that exits with a code other than 0 ends the others, which may still save.
            coordinator.wait_for_all("end", timeout_s=LEAVE_TIMEOUT_S)
    coordinator.leave()
    watch.stop()
    if keep_mpi:
        finalize_mpi()


def _join(session: Session, world: World, *, keep_mpi: bool, for_command: bool) -> Coordinator:
    timeout_s = _seconds(TIMEOUT, _JOIN_TIMEOUT_S)
    if is_joined(os.environ):
        return _join_children(world, timeout_s, session)
    if not for_command:
        import torch  # noqa: F401 - a rank that hangs here has not joined, and the launcher names the line
    if session.channel is not None:
        session.channel.send("joining", timeout_s=timeout_s)
        timeout_s += _LAUNCHER_HEAD_START_S
    if world.launcher.speaks_mpi and world.world_size > 1 and not _has_address(world):
        result = rendezvous_over_mpi(world, timeout_s=timeout_s, keep_mpi=keep_mpi)
        if for_command and not result.has_fixed_port:
            from mpiddp.runtime.command.torch_store import serve_commands

            coordinator, result = serve_commands(result, timeout_s)
        else:
            coordinator = _connect(result.world, result.listener, timeout_s, result.store_secret)
    else:
        from mpiddp.runtime.store import find_by_address, rendezvous_over_store

        # Without MPI, only a launcher gives the ranks a common secret.
        secret = session.channel.secret if session.channel is not None else ""
        coordinator = _connect(*find_by_address(world, timeout_s), timeout_s, secret)
        result = rendezvous_over_store(coordinator, timeout_s)
        coordinator.world = result.world
    if world.local_world_size is None and (threads := limit_threads(result.world)):
        _set_threads(threads)
    coordinator.hostnames = tuple(info.hostname for info in result.infos)
    coordinator.has_launcher = session.channel is not None
    export(result)
    session.send("error_file", path=os.environ.get(ERROR_FILE, ""))
    check_placement(coordinator, result, uses_gpus=not for_command)
    return coordinator


def _set_threads(threads: int) -> None:
    """Set the threads of torch, if this process uses it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def _has_address(world: World) -> bool:
    """Whether the ranks of a resource manager, which starts any program, know rank 0's address already."""
    is_named = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    return is_named and world.launcher.name in ("flux", "jsrun", "pals")


def join_steps(session: Session) -> None:
    """Let the script of a rank's command agree with the other scripts on the step of a stop.

    A script that calls should_stop() and forms its process group by itself has not joined. This waits for no
    other rank. Without torch, whose store carries the agreement, every rank stops at a step of its own.
    """
    world = World.from_env()
    try:
        coordinator = _connect_children(world, _seconds(TIMEOUT, _JOIN_TIMEOUT_S), session)
    except ImportError:
        return
    session.coordinator = coordinator
    session.stop.is_alone = world.world_size == 1
    watch = FailureWatch(coordinator, session.stop, has_launcher=session.channel is not None)
    session.watch = watch
    watch.start()
    atexit.register(_leave_steps, session, coordinator, watch)


def _leave_steps(session: Session, coordinator: Coordinator, watch: FailureWatch) -> None:
    if session.is_of_this_process:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            session.stop.propose_step(coordinator.values, coordinator.world.rank, 0)
        watch.stop()


def _join_children(world: World, timeout_s: float, session: Session) -> Coordinator:
    """Join the child processes of the ranks, over the store of the ranks.

    The n-th child of a rank joins the n-th children of the others.
    """
    coordinator = _connect_children(world, timeout_s, session)
    with no_dns():
        hostnames = coordinator.all_gather_json(world.hostname, timeout_s=timeout_s)
    coordinator.hostnames = tuple(hostnames)
    return coordinator


def _connect_children(world: World, timeout_s: float, session: Session) -> Coordinator:
    """Connect a child process of a rank to the store of the ranks. Waits for no other child."""
    from torch.distributed import PrefixStore

    from mpiddp.runtime.store import serve_or_join

    env = os.environ
    try:
        world = replace(
            world,
            master_addr=env["MASTER_ADDR"],
            master_port=parse_whole(env["MASTER_PORT"], 1, 1 << 16),
            node_rank=parse_whole(env["GROUP_RANK"]),
            num_nodes=parse_whole(env["GROUP_WORLD_SIZE"], 1),
        )
    except (KeyError, ValueError):
        raise UserError(
            "MASTER_ADDR, MASTER_PORT, GROUP_RANK and GROUP_WORLD_SIZE are not those of the rank that "
            f"started this process. Leave them as they are, or unset {RUN_ID} to start a job of its own."
        ) from None
    with no_dns():
        store = serve_or_join(world, None, timeout_s)
        number = store.add(f"children/{world.rank}", 1)
        # The scripts of commands share a secret; children that a script has started do not.
        prefixed = PrefixStore(f"child/{number}", store)
        return Coordinator(world, prefixed, session.script_secret)


def _connect(
    world: World, listener: socket.socket | None, timeout_s: float, secret: str
) -> Coordinator:
    """Connect all ranks to one store. Raises the errors of `serve_or_join` and `all_gather_json`."""
    from mpiddp.runtime.store import serve_or_join

    with no_dns():
        coordinator = Coordinator(world, serve_or_join(world, listener, timeout_s), secret)
        # Inside the body, because rank 0 looks up the name of every connection that it accepts.
        coordinator.all_gather_json(None, timeout_s=timeout_s)
    return coordinator


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_TIMEOUT_S:
        raise UserError(
            f'{name}="{shown(text)}" is not a number of seconds greater than 0 '
            f"and less than {MAX_TIMEOUT_S}."
        )
    return value
