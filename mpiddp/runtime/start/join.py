"""The ranks of a job join under any launcher, agree over one channel, and leave together.

    with join(world) as coordinator:
        coordinator.all_gather_json(socket.gethostname(), timeout_s=60)

`mpiddp run` joins before a script's first line. Elsewhere a process group, or `mpiddp.Checkpoints`, joins.
The variables that a joined rank sets are those of torchrun, and the network. Under torchrun itself its own
stay as they are. https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from weakref import WeakKeyDictionary

from mpiddp.errors import FAILED, JobFailed
from mpiddp.protocol.variables import (
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    MAX_RESTARTS,
    OBSERVER,
    PLACEMENT,
    REPORT,
    RESTART_COUNT,
    RUN_ID,
    VERBOSE,
)
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Refused, ending_of
from mpiddp.runtime.job.failure_watch import FailureWatch
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.launcher.connected import script_session
from mpiddp.runtime.log import log_to_console
from mpiddp.runtime.rendezvous.meet import meet, meet_as_child
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.world import World, is_joined


@contextlib.contextmanager
def join(
    world: World | None = None, *, keep_mpi: bool = False, uses_torch: bool = True
) -> Iterator[Coordinator]:
    """Join the ranks. They leave together at the end of the body.

    Then os.environ holds the variables that scripts find under torchrun. A child process of a rank joins the
    children of the other ranks.

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
    if world.local_world_size is None:  # the local ranks have just been counted
        threads, torch = limit_threads(coordinator.world), sys.modules.get("torch")
        if threads and torch:
            torch.set_num_threads(threads)
    _export(result, coordinator.channel)
    if session.launcher is not None and "torch" in sys.modules:
        _report_optimizer_steps(session.optimizer_stepped)
    if observer := os.environ.get(OBSERVER):
        import_module(observer).observe()
    session.send("error_file", path=os.environ.get(ERROR_FILE, ""))
    if any(os.environ.get(name) for name in (PLACEMENT, REPORT, VERBOSE)):
        from mpiddp.runtime.rendezvous.placement import check_placement

        check_placement(coordinator, result, uses_gpus=uses_torch)
    return coordinator


def limit_threads(world: World) -> int | None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS is set.

    torch sizes its thread pools when it is imported. A rank that mpirun has bound to some cores uses at
    most that many threads.

    Returns:
        The number of threads; None if the user decides, or as long as the local ranks are not counted.
    """
    if world.local_world_size is None or "OMP_NUM_THREADS" in os.environ:
        return None
    share = (os.cpu_count() or 1) // world.local_world_size
    bound_to = len(os.sched_getaffinity(0))
    threads = max(1, min(share, bound_to))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def _export(result: RendezvousResult, channel: JobChannel | None) -> None:
    """Set the variables in os.environ. What the script starts may join over the channel.

    TORCHELASTIC_USE_AGENT_STORE stays unset: with it, `init_method="tcp://…"` on another port would wait
    for a store that nobody serves.
    """
    world, env = result.world, os.environ
    env.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.local_rank),
        WORLD_SIZE=str(world.world_size),
        LOCAL_WORLD_SIZE=str(world.local_world_size),
        GROUP_RANK=str(world.node_rank),
        MASTER_ADDR=str(world.master_addr),
        MASTER_PORT=str(world.master_port),
    )
    if channel is not None:
        server = channel.server.for_children()
        env.update({CHANNEL: server.address, CHANNEL_SECRET: server.key})
    if world.launcher.name != "torchrun":
        env.update(_elastic_variables(world, result.run_id))
    if result.interface:
        # gloo uses the address of the host's own name, which Debian maps to 127.0.1.1; NCCL uses the
        # first interface that it finds suitable. With "=", NCCL matches the whole name, not a prefix.
        env.setdefault("GLOO_SOCKET_IFNAME", result.interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={result.interface}")


def _elastic_variables(world: World, run_id: str) -> dict[str, str]:
    return {
        RUN_ID: run_id,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": os.environ.get(RESTART_COUNT, "0"),
        "TORCHELASTIC_MAX_RESTARTS": os.environ.get(MAX_RESTARTS, "0"),
        "GROUP_WORLD_SIZE": str(world.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.world_size),
        **_error_file(world.rank),
    }


def _error_file(rank: int) -> dict[str, str]:
    """The variable of a new file of this rank, into which torch's `@record` writes the script's error.

    No other user of the host can guess its name, and so create it before. A full disk has no place for it.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return {}
    file = Path(folder, f"mpiddp-{secrets.token_hex(16)}-{rank}-error.json")
    atexit.register(file.unlink, missing_ok=True)
    return {ERROR_FILE: str(file)}


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
