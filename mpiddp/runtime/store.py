"""The one store of a job: rank 0 serves it on a socket that is already bound, and the others connect.

Without an MPI that carries messages (torchrun, srun, env://), the ranks know the address of the store
beforehand, and join over it.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import asdict, replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import (
    OPEN_BESIDES,
    SOCKETS_PER_RANK,
    allow_open,
    bind,
    port_in,
    resolve,
    resolve_own,
    wait_for,
)
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.master_address import LOOPBACK, RankInfo, check_interface, requested_interface
from mpiddp.runtime.rendezvous import RendezvousResult
from mpiddp.runtime.slurm_address import slurm_address
from mpiddp.world import World, is_joined


def serve_or_join(world: World, listener: socket.socket | None, timeout_s: float) -> Store:
    """The store at `world.master_addr`. The rank that has a listener serves it, the others connect.

    `multi_tenant` lets an env:// or tcp:// init in rank 0's process use this server too.

    Raises:
        JobFailed: another program listens there.
    """
    assert world.master_addr is not None
    assert world.master_port is not None
    if listener is not None:
        allow_open(SOCKETS_PER_RANK * world.world_size + OPEN_BESIDES)
    try:
        store = TCPStore(
            world.master_addr,
            world.master_port,
            world.world_size,
            is_master=listener is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except RuntimeError:
        raise JobFailed(
            f"rank {world.rank} on {world.hostname}: another program listens on {world.master_addr} "
            f"port {world.master_port}, not rank 0 of this job. Set MASTER_PORT to a free port."
        ) from None
    # torchrun's store outlives the workers. Restarted workers must not read the keys of the earlier
    # ones. A store of ours lives in one attempt.
    attempt = "0" if is_joined(os.environ) else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mpiddp/{attempt}", store)


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
    is_server = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = _reachable(world, address)
    listener = bind(address, port, world.hostname) if is_server else None
    if listener is not None:
        port = listener.getsockname()[1]
    elif not wait_for(address, port, timeout_s):
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach rank 0 at {address} port {port} "
            f"in {timeout_s:g} s. Check that rank 0 is running and that no firewall blocks the port."
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


def rendezvous_over_store(coordinator: Coordinator, timeout_s: float) -> RendezvousResult:
    """The same result as over MPI: the host of every rank, and the interface that this rank uses.

    That is the requested interface, else the one towards the master address, which is known beforehand.

    Raises:
        SystemExit: code 2, on every rank: a host has no such interface.
    """
    world = coordinator.world
    infos = RankInfo.all_from_json(
        coordinator.all_gather_json(asdict(RankInfo.of_this_process(world)), timeout_s=timeout_s)
    )
    hosts = list(dict.fromkeys(info.host for info in infos))
    own = infos[world.rank]
    assert world.master_addr is not None
    interface = own.interface_towards(world.master_addr)
    requested = requested_interface(os.environ)
    if requested and len(hosts) > 1:
        with coordinator.all_or_none():
            check_interface(infos, requested)
        interface = next(each.name for each in own.interfaces if each.matches(requested))
    return RendezvousResult(
        world=replace(
            world,
            local_rank=own.local_rank,
            local_world_size=own.local_world_size,
            node_rank=hosts.index(own.host),
            num_nodes=len(hosts),
        ),
        infos=infos,
        interface=interface,
        reason=f"{world.launcher.name} names it",
        listener=None,
        run_id=coordinator.broadcast_json(os.environ.get(RUN_ID) or secrets.token_hex(8)),
    )
