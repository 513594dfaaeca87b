"""The ranks join under any launcher, agree over one channel, and leave together.

Under `mpiddp launch` and `mpiddp run` the ranks' agents have met before a script's first line, and they end
the ranks. By hand a process group, or `mpiddp.Checkpoints`, joins. Then the thread of a rank's channel ends
its process once another rank has failed: not every MPI does so, and a rank inside an NCCL collective waits.

Python keeps an uncaught error in `sys.last_value` for the handlers of atexit, but not the SystemExit that
ends a script (CPython 3.10 to 3.13). The script's outermost frame shows that there was one: otherwise the
frame's last instruction is a return. Its code is the process's own, which the parent sees.
tests/integration/runtime/test_still_needed.py fails once Python keeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from mpiddp import sinks
from mpiddp.errors import BAD_INPUT, FAILED, JobFailed, UserError, print_error, print_from_one_rank
from mpiddp.protocol.variables import AGENT_STORE, CHANNEL, CHANNEL_SECRET
from mpiddp.runtime import patches
from mpiddp.runtime.gpu import limit_threads
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.leaving import EXIT_UNKNOWN, exit_now
from mpiddp.runtime.job.session import ProcessKind, Session, current, script_session
from mpiddp.runtime.rank_log import log_to_console
from mpiddp.runtime.rendezvous.meet import meet
from mpiddp.runtime.rendezvous.sockets import bind, resolve
from mpiddp.world import World

Value = TypeVar("Value")

_REACHED_S = 600.0  # in which all scripts reach a line, unless the caller says otherwise


@contextlib.contextmanager
def join(world: World | None = None, timeout_s: float = _REACHED_S) -> Iterator[Coordinator]:
    """Join the ranks. They leave together at the end of the body.

    If their agents have met, all scripts must come here within `timeout_s` of the first one.
    Then os.environ holds the variables that scripts find under torchrun, by hand without an error file.
    """
    session = script_session(joins=True)
    if not session.coordinator.hostnames:
        world = world or World.from_env(session.env)
        log_to_console(world.rank)
        if session.kind is not ProcessKind.SCRIPT:
            patches.apply([patches.no_dns], session)
        if session.kind is ProcessKind.BY_HAND:
            _by_hand(world, session)
        else:
            _as_script(world, session, timeout_s)
    coordinator = session.coordinator
    if session.is_member:  # mpiddp.Checkpoints has joined, and is the one to leave
        yield coordinator
        return
    session.is_member = True
    patches.apply([patches.stop_signal], session)
    if session.kind is ProcessKind.BY_HAND and coordinator.connection is not None:
        session.end.error = None  # the script has caught an earlier one
        coordinator.listen(session.obey, session.end.watch)
        session.end.watch()  # news may have come since an earlier process group
    try:
        yield coordinator
    except BaseException as error:
        session.end.of_group(error)
        raise
    else:
        session.end.of_group()
    finally:
        session.is_member = False


def _as_script(world: World, session: Session, timeout_s: float) -> None:
    """Meet the scripts of the other ranks, whose agents have met."""
    from multiprocessing import current_process

    from mpiddp.runtime.rendezvous.store import serve_store

    env, ranks = session.env, session.coordinator
    if getattr(current_process(), "_inheriting", False):
        sentence = (
            "a process of multiprocessing, such as a DataLoader's worker, runs the script again."
        )
        raise UserError(sentence, fix='put its main part below: if __name__ == "__main__":')
    if ranks.connection is None and world.world_size > 1:
        raise UserError(
            f"rank {world.rank} has a script already, or lacks {CHANNEL} and {CHANNEL_SECRET}: only one "
            "process of a rank joins the others.",
            fix="call mpiddp in the process that trains, and not in the one that starts it",
        )
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    world = world._replace(
        local_rank=int(env["LOCAL_RANK"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        master_addr=address,
        master_port=port,
        node_rank=int(env["GROUP_RANK"]),
        num_nodes=int(env["GROUP_WORLD_SIZE"]),
    )
    # A script has its agent's process for the store, or will have one once it imports torch.
    is_script = session.kind is ProcessKind.SCRIPT
    is_served = session.store or (is_script and patches.is_on(patches.store_of_job.__name__))
    if (
        world.rank == 0
        and world.world_size > 1
        and not (is_served or env.get(AGENT_STORE) == "True")
    ):
        # As in a command, nobody serves the store yet, unless the script has formed a group by itself.
        with contextlib.suppress(UserError, JobFailed):
            session.torch_store = serve_store(
                env, bind(resolve(address), port, world.hostname).detach()
            )
    ranks.world = world
    ranks.hostnames = ranks.all_gather_json(world.hostname, timeout_s=timeout_s)


def _by_hand(world: World, session: Session) -> None:
    """Meet the other ranks, and prepare this process for what it runs."""
    from mpiddp.runtime.rendezvous.store import serve_store

    session.coordinator.world, problem = world, ""
    try:
        if world.rank == 0:
            sinks.require(os.environ)
    except UserError as error:
        problem = str(error)
    try:
        env, _, (listener, _) = meet(session.coordinator, problem, apart=False)
    except UserError as error:  # the ranks have not met: for example, the MPI is another one
        print_from_one_rank(str(error), world.rank, world.local_rank)
        raise SystemExit(BAD_INPUT) from None
    os.environ.update(env)
    if listener is not None:
        session.torch_store = serve_store(env, listener.detach())
    atexit.register(session.end.by_hand)
    if world.local_world_size is None:  # the local ranks have just been counted
        limit_threads(session.coordinator.world)


def enter_until_exit(context: AbstractContextManager[Value]) -> Value:
    """Enter the context, and leave it when the interpreter exits, with the error that ended the script."""
    value = context.__enter__()
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back

    def leave() -> None:
        session = current()
        error: BaseException | None = session.end.error or getattr(sys, "last_value", None)
        if (
            session.kind is not ProcessKind.SCRIPT
            and error is None
            and not session.stop.has_stopped
        ):
            last_instruction = dis.opname[outermost.f_code.co_code[outermost.f_lasti]]
            error = None if last_instruction.startswith("RETURN") else EXIT_UNKNOWN
        context.__exit__(type(error) if error else None, error, None)

    at_exit(leave)
    return value


def at_exit(action: Callable[[], None]) -> None:
    """Call the action when the interpreter exits, but not in a forked child. Its error ends the process.

    Python would print the error, and end with the script's own code, which knows nothing of the last save.
    """

    def act(process: int) -> None:
        if os.getpid() != process:
            return
        try:
            action()
        except SystemExit as end:  # it has said why
            exit_now(end.code)
        except (JobFailed, UserError) as error:
            print_error(error)
            exit_now(ending_of(error).code)
        except BaseException:
            traceback.print_exc()
            exit_now(FAILED)

    atexit.register(act, os.getpid())
