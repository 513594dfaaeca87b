"""The ranks meet: over MPI, at an address that they know, or, as children of ranks, at the store of these.

All ways end with a coordinator, which speaks for all ranks, and with what the ranks know of each other. Each
way imports only what it needs.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from dataclasses import dataclass, replace

from mpiddp.errors import UserError
from mpiddp.protocol.variables import MAX_TIMEOUT_S, RUN_ID, TIMEOUT
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.rendezvous.name_service import no_dns
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.text import parse_whole, shown
from mpiddp.world import World

_JOIN_TIMEOUT_S = 60.0
_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them


@dataclass(frozen=True)
class Needs:
    """What a rank needs of the rendezvous.

    keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.
    for_command: this process only starts a command, so it does without torch if it can. Then a process beside
        rank 0 serves torch's store for the commands.
    """

    keep_mpi: bool = False
    for_command: bool = False


def meet(world: World, session: Session, needs: Needs) -> tuple[Coordinator, RendezvousResult]:
    """Meet the other ranks. All ranks must call this.

    Raises:
        UserError: inconsistent variables of launchers, a foreign MPI.
        JobFailed: ranks that do not join.
        SystemExit: code 2, on every rank, after rank 0 has printed the reason.
    """
    timeout_s = joining_timeout_s()
    if not needs.for_command:
        _import_torch()
    session.send("joining", timeout_s=timeout_s)
    has_launcher = session.channel is not None
    if has_launcher:
        timeout_s += _LAUNCHER_HEAD_START_S
    if world.launcher.speaks_mpi and world.world_size > 1 and not _has_address(world):
        coordinator, result = _over_mpi(world, timeout_s, needs)
    else:
        # Without MPI, only a launcher gives the ranks a common secret.
        secret = session.channel.secret if session.channel is not None else ""
        coordinator, result = _by_address(world, timeout_s, secret)
    hostnames = tuple(info.hostname for info in result.infos)
    return coordinator.met(result.world, hostnames, has_launcher=has_launcher), result


def _import_torch() -> None:
    """Import torch, unless it is imported, and tell the garbage collector that its modules are no garbage.

    They live as long as the process. Otherwise the collector visits their 250,000 objects while they are
    made, in each full collection of the training, and several times when the process ends: a third of the
    processor time of a short rank.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401 - a rank that hangs here has not joined, and the launcher names the line

        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _over_mpi(world: World, timeout_s: float, needs: Needs) -> tuple[Coordinator, RendezvousResult]:
    from mpiddp.runtime.rendezvous.mpi import rendezvous_over_mpi

    result = rendezvous_over_mpi(world, timeout_s=timeout_s, keep_mpi=needs.keep_mpi)
    if needs.for_command and not result.has_fixed_port:
        from mpiddp.runtime.rendezvous.torch_store import serve_commands

        return serve_commands(result, timeout_s)
    return _connect(result.world, result.listener, timeout_s, result.store_secret), result


def _by_address(
    world: World, timeout_s: float, secret: str
) -> tuple[Coordinator, RendezvousResult]:
    from mpiddp.runtime.rendezvous.address import find_by_address, rendezvous_over_store

    coordinator = _connect(*find_by_address(world, timeout_s), timeout_s, secret)
    return coordinator, rendezvous_over_store(coordinator, timeout_s)


def _has_address(world: World) -> bool:
    """Whether the ranks of a resource manager, which starts any program, know rank 0's address already."""
    is_named = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    return is_named and world.launcher.starts_any_program


def _connect(
    world: World, listener: socket.socket | None, timeout_s: float, secret: str
) -> Coordinator:
    """Connect all ranks to one store. Raises the errors of `serve_or_join` and `all_gather_json`."""
    from mpiddp.runtime.rendezvous.store import serve_or_join

    with no_dns():
        coordinator = Coordinator(world, serve_or_join(world, listener, timeout_s), secret)
        # Inside the body, because rank 0 looks up the name of every connection that it accepts.
        coordinator.all_gather_json(None, timeout_s=timeout_s)
    return coordinator


def meet_as_child(world: World, session: Session, *, waits: bool = True) -> Coordinator:
    """Meet the child processes of the other ranks, over the store of the ranks.

    The n-th child of a rank meets the n-th children of the others.

    Args:
        waits: for these children. Otherwise their hosts stay unknown.

    Raises:
        UserError: variables that are not those of a rank.
        JobFailed: ranks that have ended, children that do not join.
    """
    from torch.distributed import PrefixStore

    from mpiddp.runtime.rendezvous.store import serve_or_join

    env, timeout_s = os.environ, joining_timeout_s()
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
        coordinator = Coordinator(world, prefixed, session.script_secret)
        if not waits:
            return coordinator
        hostnames = coordinator.all_gather_json(world.hostname, timeout_s=timeout_s)
    return coordinator.met(world, tuple(hostnames))


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is not a number."""
    text = os.environ.get(TIMEOUT, "")
    try:
        value = float(text) if text else _JOIN_TIMEOUT_S
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_TIMEOUT_S:
        raise UserError(
            f'{TIMEOUT}="{shown(text)}" is not a number of seconds greater than 0 '
            f"and less than {MAX_TIMEOUT_S}."
        )
    return value
