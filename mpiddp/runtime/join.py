"""The ranks join under any launcher, agree over one channel, and leave together.

    with join(world) as coordinator:
        coordinator.all_gather_json(socket.gethostname(), timeout_s=60)

Under `mpiddp launch` and `mpiddp run` the ranks' agents have met before a script's first line. By hand a
process group, or `mpiddp.Checkpoints`, joins.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind
from mpiddp.protocol.variables import (
    AGENT_STORE,
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    OBSERVER,
    RUN_ID,
)
from mpiddp.runtime.gpu import limit_threads
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Refused, ending_of
from mpiddp.runtime.job.failure import ExitUnknown, FailureWatch
from mpiddp.runtime.job.session import Session, script_session
from mpiddp.runtime.log import log_to_console
from mpiddp.world import World, is_joined


@contextlib.contextmanager
def join(world: World | None = None, *, keep_mpi: bool = False) -> Iterator[Coordinator]:
    """Join the ranks. They leave together at the end of the body.

    Then os.environ holds the variables that scripts find under torchrun.

    Args:
        world: the world of this process; by default read from the environment.
        keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.
    """
    session = script_session()
    if session.coordinator is None:
        world = world or World.from_env()
        log_to_console(world.rank)
        has_agent = session.control is not None or is_joined(os.environ)
        session.coordinator = (
            _as_script(world, session) if has_agent else _by_hand(world, session, keep_mpi=keep_mpi)
        )
    coordinator = session.coordinator
    if session.watch is not None:  # mpiddp.Checkpoints has joined, and is the one to leave
        yield coordinator
        return
    session.stop.enter_group()
    if session.control is None and coordinator.channel is not None:
        coordinator.channel.begin_session()
    session.watch = watch = FailureWatch(session, coordinator)
    watch.start()
    try:
        yield coordinator
    except BaseException as error:
        if session.is_of_this_process:
            _end(session, coordinator, watch, error)
        raise
    else:
        if session.is_of_this_process:
            _end(session, coordinator, watch)
    finally:
        session.watch = None


def _as_script(world: World, session: Session) -> Coordinator:
    """Meet the scripts of the other ranks, whose agents have met."""
    from mpiddp.runtime.rendezvous.meet import joining_timeout_s
    from mpiddp.runtime.rendezvous.store import serve_store

    env = os.environ
    if session.channel is None and world.world_size > 1:
        raise UserError(
            f"rank {world.rank} has a script already, or lacks {CHANNEL} and {CHANNEL_SECRET}: only the "
            f"first process of a rank joins the others. Unset {RUN_ID} to start a job of its own."
        )
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    world = replace(
        world,
        local_rank=int(env["LOCAL_RANK"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        master_addr=address,
        master_port=port,
        node_rank=int(env["GROUP_RANK"]),
        num_nodes=int(env["GROUP_WORLD_SIZE"]),
    )
    has_store = session.torch_store is not None or env.get(AGENT_STORE) == "True"
    if world.rank == 0 and world.world_size > 1 and not has_store:
        # In a command, nobody serves the store yet, unless the script has formed a group by itself.
        with contextlib.suppress(UserError, JobFailed):
            listener = bind(address, port, world.hostname)
            session.torch_store = serve_store(env, listener.detach())
    # Python keeps no SystemExit for the handler that reports a command's end, so that one prints why.
    reports = session.has_launcher and session.control is not None
    coordinator = Coordinator(world, session.channel, has_launcher=reports)
    names = coordinator.all_gather_json(world.hostname, timeout_s=joining_timeout_s())
    coordinator.hostnames = tuple(names)
    return coordinator


def _by_hand(world: World, session: Session, *, keep_mpi: bool) -> Coordinator:
    """Meet the other ranks, and prepare this process for what it runs."""
    from mpiddp.runtime.rendezvous.meet import meet
    from mpiddp.runtime.rendezvous.result import RankInfo
    from mpiddp.runtime.rendezvous.store import serve_store
    from mpiddp.runtime.script import import_torch

    import_torch()
    own = lambda: RankInfo.of_this_process(world)  # noqa: E731
    with meet(world, own, keep_mpi=keep_mpi) as (coordinator, result):
        os.environ.update(result.variables(None))
        if result.listener is not None:
            session.torch_store = serve_store(os.environ, result.listener.detach())
    session.channel = coordinator.channel
    if world.local_world_size is None:  # the local ranks have just been counted
        threads, torch = limit_threads(coordinator.world), sys.modules.get("torch")
        if threads and torch:
            torch.set_num_threads(threads)
    if file := os.environ.get(ERROR_FILE):
        atexit.register(Path(file).unlink, missing_ok=True)
    if observer := os.environ.get(OBSERVER):
        import_module(observer).observe()
    return coordinator


def _end(
    session: Session,
    coordinator: Coordinator,
    watch: FailureWatch,
    error: BaseException | None = None,
) -> None:
    """Leave after a body that succeeded, else end the job. After an error there is no rank to wait for.

    Raises SystemExit instead of a UserError or a JobFailed, after printing or reporting it.
    """
    if isinstance(error, Refused):
        watch.stop()
        return
    if isinstance(error, ExitUnknown):  # the one who has started this process knows its code
        session.finish()
        coordinator.claim_first_failure()
        watch.stop()
        coordinator.leave(waits=False)
        return
    ending = ending_of(error, has_stopped=session.stop.has_stopped)
    if not ending.is_failure:  # many scripts end with sys.exit(main())
        try:
            session.finish()
        except (JobFailed, OSError) as failure:
            _end(session, coordinator, watch, JobFailed(str(failure)))
        if coordinator.channel is not None:
            session.stop.propose_step(coordinator.channel, 0)
        if session.stop.has_stopped:
            session.stop_is_saved()
        # The first rank that exits with a code other than 0 ends the others, which may still save.
        coordinator.leave(waits=session.stop.has_stopped or coordinator.world.rank == 0)
        watch.stop()
    elif not ending.traceback:
        coordinator.claim_first_failure()
        session.report(ending)
        watch.fail(ending)
        if not isinstance(error, SystemExit):
            raise SystemExit(ending.code) from None
    elif session.control is None:  # else `mpiddp.runtime.script` reports it
        coordinator.claim_first_failure()
        atexit.register(watch.fail_at_exit)  # unless the script catches it
