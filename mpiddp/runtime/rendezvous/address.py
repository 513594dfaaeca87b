"""Join the ranks that know rank 0's address beforehand: under torchrun, srun, env:// and alone.

In a Slurm step that no MPI serves, every task computes the same address and port from the variables of the
step, without any message.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace

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
    gathered,
    requested_interface,
    world_with,
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
    address, port = env.get("MASTER_ADDR", ""), port_in(env)
    if world.world_size == 1 and world.launcher.name != "torchrun":
        address = LOOPBACK
    elif world.launcher.name == "slurm":
        address, port = slurm_address(env)
    elif not (address and env.get("MASTER_PORT")):
        raise UserError(
            f"RANK={world.rank} and WORLD_SIZE={world.world_size} are set. Without MPI, the ranks need "
            "MASTER_ADDR and MASTER_PORT as well, to find each other."
        )
    # Over several hosts, a name that leads to 127.0.1.1 on rank 0's own host is another address.
    is_on_one_host = world.local_world_size == world.world_size or address.startswith("127.")
    address = resolve(address) if is_on_one_host else resolve_own(address)
    listener = None
    if world.rank == 0 and env.get(AGENT_STORE) != "True":
        listener = bind(address, port, world.hostname)
        port = listener.getsockname()[1]
    elif not wait_for(address, port, timeout_s):
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach rank 0 at {address} port {port} "
            f"in {timeout_s:g} s. Check that rank 0 is running and that no firewall blocks the "
            "port."
        )
    return replace(world, master_addr=address, master_port=port), listener


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
    """
    world, address = coordinator.world, str(coordinator.world.master_addr)
    port = listener.getsockname()[1] if listener is not None else world.master_port
    run_id = os.environ.get(RUN_ID) or secrets.token_hex(8)
    answers = coordinator.all_gather_json((own_info().as_json(), port, run_id), timeout_s=timeout_s)
    infos = gathered(info for info, _, _ in answers)
    _, port, run_id = answers[0]
    world = world_with(world, infos, address, int(port or 0))
    own, requested = infos[world.rank], requested_interface(os.environ)
    interface = own.interface_towards(address)
    with coordinator.all_or_none():
        check_alike(infos, os.environ)
        if requested and world.num_nodes != 1:
            check_interface(infos, requested)
            interface = next(each.name for each in own.interfaces if each.matches(requested))
    return RendezvousResult(
        world=world,
        infos=infos,
        interface=interface,
        reason=f"{world.launcher.name} names it",
        listener=listener,
        run_id=run_id,
    )


def slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host and port in this step. The user's MASTER_ADDR and MASTER_PORT are honoured.

    The port is computed from job and step, in [20000, 52767], because nothing can carry the number of a
    free port from rank 0 to the others. Two steps on one host seldom get the same port.
    """
    from mpiddp.hosts.allocations import expand_nodelist

    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    address, port = env.get("MASTER_ADDR"), port_in(env)
    try:
        job, step = (parse_whole(env.get(name) or "0", high=1 << 32) for name in names)
        port = port or 20000 + (job * 31 + step) % 32768
        if not address:
            first, *others = expand_nodelist(nodelist)
            address = first if others else LOOPBACK
    except ValueError as error:
        found = ", ".join(f"{name}={shown(env.get(name, ''))}" for name in names)
        raise UserError(
            f'{found} and SLURM_STEP_NODELIST="{shown(nodelist)}" are not those of a Slurm step: {error}. '
            "Start the job with srun, or set MASTER_ADDR and MASTER_PORT."
        ) from None
    return address, port
