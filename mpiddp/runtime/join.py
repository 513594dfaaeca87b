"""The ranks of a job join under any launcher, agree over one channel, and leave together.

    with join(world) as coordinator:
        coordinator.all_gather_json(socket.gethostname(), timeout_s=60)

Under `mpiddp launch` and `mpiddp run` the ranks' agents have met before a script's first line. By hand a
process group, or `mpiddp.Checkpoints`, joins. The variables that a joined rank sets are those of torchrun,
and the network. https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from mpiddp.errors import FAILED, JobFailed, UserError
from mpiddp.hosts.sockets import bind
from mpiddp.protocol.variables import (
    AGENT_STORE,
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    MAX_RESTARTS,
    OBSERVER,
    RESTART_COUNT,
    RUN_ID,
)
from mpiddp.runtime.gpu import limit_threads
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Refused, ending_of
from mpiddp.runtime.job.failure import FailureWatch
from mpiddp.runtime.job.script_exit import ExitUnknown
from mpiddp.runtime.job.session import Session, script_session
from mpiddp.runtime.log import log_to_console
from mpiddp.runtime.rendezvous.result import RankInfo, RendezvousResult
from mpiddp.text import parse_whole
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
    if (
        session.watch is not None
    ):  # mpiddp.Checkpoints has joined, and the script calls process_group()
        assert session.coordinator is not None
        yield session.coordinator
        return
    if session.coordinator is None:
        world = world or World.from_env()
        log_to_console(world.rank)
        if session.control is not None or is_joined(os.environ):
            session.coordinator = _as_script(world, session)
        else:
            session.coordinator = _by_hand(world, session, keep_mpi=keep_mpi)
    coordinator = session.coordinator
    session.stop.enter_group()
    if session.control is None and coordinator.channel is not None:
        coordinator.channel.begin_session()
    session.watch = watch = FailureWatch(session, coordinator)
    watch.start()
    try:
        yield coordinator
    except BaseException as error:
        if session.is_of_this_process:
            _end_with(error, session, coordinator, watch)
        raise
    else:
        if session.is_of_this_process:
            _leave(session, coordinator, watch)
    finally:
        session.watch = None


def _as_script(world: World, session: Session) -> Coordinator:
    """Meet the scripts of the other ranks, whose agents have met."""
    from mpiddp.runtime.rendezvous.meet import joining_timeout_s
    from mpiddp.runtime.rendezvous.store import serve_store

    env = os.environ
    try:
        world = replace(
            world,
            local_rank=parse_whole(env["LOCAL_RANK"]),
            local_world_size=parse_whole(env["LOCAL_WORLD_SIZE"], 1),
            master_addr=env["MASTER_ADDR"],
            master_port=parse_whole(env["MASTER_PORT"], 1, 1 << 16),
            node_rank=parse_whole(env["GROUP_RANK"]),
            num_nodes=parse_whole(env["GROUP_WORLD_SIZE"], 1),
        )
    except (KeyError, ValueError):
        raise UserError(
            "RANK, MASTER_ADDR, MASTER_PORT, GROUP_RANK and GROUP_WORLD_SIZE are not those of the rank that "
            f"started this process. Leave them as they are, or unset {RUN_ID} to start a job of its own."
        ) from None
    if session.channel is None and world.world_size > 1:
        raise UserError(
            f"rank {world.rank} has a script already, or lacks {CHANNEL} and {CHANNEL_SECRET}: only the "
            f"first process of a rank joins the others. Unset {RUN_ID} to start a job of its own."
        )
    has_store = session.torch_store is not None or env.get(AGENT_STORE) == "True"
    if world.rank == 0 and world.world_size > 1 and not has_store:
        # In a command, nobody serves the store yet, unless the script has formed a group by itself.
        with contextlib.suppress(UserError, JobFailed):
            listener = bind(str(world.master_addr), world.master_port or 0, world.hostname)
            session.torch_store = serve_store(env, listener.detach())
    coordinator = Coordinator(world, session.channel, has_launcher=session.has_launcher)
    names = coordinator.all_gather_json(world.hostname, timeout_s=joining_timeout_s())
    coordinator.hostnames = tuple(names)
    return coordinator


def _by_hand(world: World, session: Session, *, keep_mpi: bool) -> Coordinator:
    """Meet the other ranks, and prepare this process for what it runs."""
    from mpiddp.runtime.rendezvous.meet import meet
    from mpiddp.runtime.rendezvous.mpi import Meeting
    from mpiddp.runtime.rendezvous.store import serve_store
    from mpiddp.runtime.script import import_torch

    import_torch()
    found: list[Coordinator] = []

    def met(coordinator: Coordinator, result: RendezvousResult) -> None:
        os.environ.update(variables(result, None))
        if result.listener is not None:
            session.torch_store = serve_store(os.environ, result.listener.detach())
        found.append(coordinator)

    meeting = Meeting(own=lambda: RankInfo.of_this_process(world), keeps_mpi=keep_mpi)
    meet(world, meeting, None, met)
    [coordinator] = found
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


def variables(result: RendezvousResult, channel: JobChannel | None) -> dict[str, str]:
    """The variables of a rank that has met the others. What a script finds, it may use to join.

    TORCHELASTIC_USE_AGENT_STORE stays unset: with it, `init_method="tcp://…"` on another port would wait
    for a store that nobody serves.
    """
    world = result.world
    env = {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(world.node_rank),
        "MASTER_ADDR": str(world.master_addr),
        "MASTER_PORT": str(world.master_port),
    }
    if channel is not None:
        server = channel.server.for_children()
        env |= {CHANNEL: server.address, CHANNEL_SECRET: server.key}
    if world.launcher.name != "torchrun":
        env |= {
            RUN_ID: result.run_id,
            "TORCHELASTIC_RUN_ID": result.run_id,
            "TORCHELASTIC_RESTART_COUNT": os.environ.get(RESTART_COUNT, "0"),
            "TORCHELASTIC_MAX_RESTARTS": os.environ.get(MAX_RESTARTS, "0"),
            "GROUP_WORLD_SIZE": str(world.num_nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(world.rank),
            "ROLE_WORLD_SIZE": str(world.world_size),
            **_error_file(world.rank),
        }
    if result.interface:
        # gloo uses the address of the host's own name, which Debian maps to 127.0.1.1; NCCL uses the
        # first interface that it finds suitable. With "=", NCCL matches the whole name, not a prefix.
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", result.interface)
        env["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={result.interface}")
    return env


def _error_file(rank: int) -> dict[str, str]:
    """The variable of a new file of this rank, into which torch's `@record` writes the script's error.

    No other user of the host can guess its name, and so create it before. A full disk has no place for it.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return {}
    return {ERROR_FILE: str(Path(folder, f"mpiddp-{secrets.token_hex(16)}-{rank}-error.json"))}


def _end_with(
    error: BaseException, session: Session, coordinator: Coordinator, watch: FailureWatch
) -> None:
    """End the job after an error of the body.

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
        _leave(session, coordinator, watch)
        return
    if not ending.traceback:
        session.claim_first_failure()
        session.report(ending)
        watch.fail(ending)
        if not isinstance(error, SystemExit):
            raise SystemExit(ending.code) from None
    elif session.control is None:  # else `mpiddp.runtime.script` reports it
        session.claim_first_failure()
        atexit.register(watch.fail_at_exit)  # unless the script catches it


def _leave(session: Session, coordinator: Coordinator, watch: FailureWatch) -> None:
    """Leave after a body that succeeded. After an error there is no rank to wait for.

    Raises SystemExit, after printing or reporting it, if a last save has failed.
    """
    try:
        session.finish()
    except (JobFailed, OSError) as error:
        failure = error if isinstance(error, JobFailed) else JobFailed(str(error))
        session.claim_first_failure()
        session.report(ending_of(failure))
        watch.fail(ending_of(failure))
        raise SystemExit(FAILED) from None
    if coordinator.channel is not None:
        session.stop.propose_step(coordinator.channel, 0)
    if session.stop.has_stopped:
        session.stop_is_saved()
    # The first rank that exits with a code other than 0 ends the others, which may still save.
    coordinator.leave(waits=session.stop.has_stopped or coordinator.world.rank == 0)
    watch.stop()
