"""Join the ranks that know rank 0's address beforehand: under torchrun, srun, env:// and alone.

In a Slurm step that no MPI serves, every task computes the same address and port from the variables of the
step, without any message.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind, port_in, resolve, resolve_own, wait_for
from mpiddp.protocol.variables import AGENT_STORE, RUN_ID
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous.placement import check_alike
from mpiddp.runtime.rendezvous.result import (
    LOOPBACK,
    RankInfo,
    RendezvousResult,
    check_interface,
    requested_interface,
)
from mpiddp.text import parse_whole, shown
from mpiddp.world import World


def find_by_address(world: World, timeout_s: float) -> tuple[World, socket.socket | None]:
    """The master address from the environment or from Slurm's variables, and rank 0's listener there.

    Raises:
        UserError: no address, or an address that rank 0 cannot listen on.
        JobFailed: no answer of rank 0 in `timeout_s`, or of a name server.
    """
    env = os.environ
    port = port_in(env)
    if world.world_size == 1 and world.launcher.name != "torchrun":
        address = LOOPBACK
    elif world.launcher.name == "slurm":
        address, port = slurm_address(world, env)
    else:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise UserError(
                f"RANK={world.rank} and WORLD_SIZE={world.world_size} are set, but "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not. Without MPI, "
                "the ranks need MASTER_ADDR and MASTER_PORT to find each other."
            )
        address = env["MASTER_ADDR"]
    is_server = world.rank == 0 and env.get(AGENT_STORE) != "True"
    address = _reachable(world, address)
    listener = bind(address, port, world.hostname) if is_server else None
    if listener is not None:
        port = listener.getsockname()[1]
    elif not wait_for(address, port, timeout_s):
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach rank 0 at {address} port {port} "
            f"in {timeout_s:g} s. Check that rank 0 is running and that no firewall blocks the "
            "port."
        )
    return replace(world, master_addr=address, master_port=port), listener


def _reachable(world: World, name: str) -> str:
    """The address of rank 0's host. Over several hosts, 127.0.1.1 does not work.

    Raises:
        UserError: there is none.
    """
    if world.local_world_size == world.world_size:
        return resolve(name)
    try:
        return resolve_own(name)
    except UserError:
        if world.local_world_size is not None:
            raise
        return resolve(name)  # this host has a loopback only, so all ranks are on it


def rendezvous_over_channel(
    coordinator: Coordinator,
    listener: socket.socket | None,
    timeout_s: float,
    own_info: Callable[[], RankInfo],
) -> RendezvousResult:
    """The same result as over MPI: the host of every rank, and the interface that this rank uses.

    That is the requested interface, else the one towards the master address, which is known beforehand.

    Args:
        listener: that of rank 0 for torch's store, None if it has none. Its port is the master port then.

    Raises:
        SystemExit: code 2, on every rank: a host has no such interface.
    """
    world = coordinator.world
    port = listener.getsockname()[1] if listener is not None else world.master_port
    run_id = os.environ.get(RUN_ID) or secrets.token_hex(8)
    answers = coordinator.all_gather_json((asdict(own_info()), port, run_id), timeout_s=timeout_s)
    infos = RankInfo.all_from_json([info for info, _, _ in answers])
    _, port, run_id = answers[0]
    hosts = list(dict.fromkeys(info.host for info in infos))
    own = infos[world.rank]
    assert world.master_addr is not None
    interface = own.interface_towards(world.master_addr)
    requested = requested_interface(os.environ)
    with coordinator.all_or_none():
        check_alike(infos, os.environ)
        if requested and len(hosts) > 1:
            check_interface(infos, requested)
    if requested and len(hosts) > 1:
        interface = next(each.name for each in own.interfaces if each.matches(requested))
    return RendezvousResult(
        world=replace(
            world,
            local_rank=own.local_rank,
            local_world_size=own.local_world_size,
            node_rank=hosts.index(own.host),
            num_nodes=len(hosts),
            master_port=port,
        ),
        infos=infos,
        interface=interface,
        reason=f"{world.launcher.name} names it",
        listener=listener,
        run_id=run_id,
    )


def slurm_address(world: World, env: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host and port in this step. The user's MASTER_ADDR and MASTER_PORT are honoured.

    The port is computed from job and step, in [20000, 52767], because nothing can carry the number of a
    free port from rank 0 to the others. Two steps on one host seldom get the same port.

    Raises:
        UserError: MASTER_PORT is not a port, or the step's variables are wrong or name no host.
    """
    job, step = (_id(name, env.get(name) or "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = port_in(env) or 20000 + (job * 31 + step) % 32768
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if world.world_size == world.local_world_size:
        return LOOPBACK, port
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    if not nodelist:
        raise UserError("SLURM_STEP_NODELIST names no host. Set MASTER_ADDR.")
    try:
        from mpiddp.hosts.allocations import expand_nodelist  # few ranks need it

        return expand_nodelist(nodelist)[0], port
    except ValueError as error:
        raise UserError(
            f'SLURM_STEP_NODELIST="{shown(nodelist)}" is not Slurm\'s: {error}. Set MASTER_ADDR.'
        ) from None


def _id(name: str, text: str) -> int:
    try:
        return parse_whole(text, high=1 << 32)
    except ValueError:
        raise UserError(
            f'{name}="{shown(text)}" is not an id of Slurm. Unset it, or start the job with srun.'
        ) from None
