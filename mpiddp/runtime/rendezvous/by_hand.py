"""How ranks meet without `mpiddp launch`: over MPI, at the address of rank 0, or by the store of torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from zlib import crc32

from mpiddp.errors import JobFailed, UserError
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous import sockets
from mpiddp.runtime.rendezvous.channel_process import serve_beside
from mpiddp.runtime.rendezvous.mpi import over_mpi
from mpiddp.runtime.rendezvous.result import LOOPBACK
from mpiddp.text import shown
from mpiddp.world import World

_FIRST_PORT = 1 << 14


def way_to_meet(ranks: Coordinator, timeout_s: float) -> AbstractContextManager[None]:
    """Let `ranks` agree over MPI in the body, or from now on over a channel at a known address."""
    launcher, env = ranks.world.launcher, os.environ
    # The ranks of a resource manager, which starts any program, may know rank 0's address already.
    is_named = bool(env.get("MASTER_ADDR") and env.get("MASTER_PORT"))
    if launcher.mpis and not (is_named and launcher.starts_any_program):
        return over_mpi(ranks, timeout_s)
    connect_by_address(ranks, timeout_s)
    return nullcontext()


def connect_by_address(ranks: Coordinator, timeout_s: float) -> None:
    """Connect ranks that know the address of rank 0, which is set in their world."""
    address, port = address_of_rank_0(ranks.world, os.environ)
    world = ranks.world._replace(master_addr=address, master_port=port)
    if os.environ.get(AGENT_STORE) == "True":
        server = _serve_beside_agent(world, timeout_s)
    else:
        # The channel is where the ranks expect rank 0. They share no secret, so the key keeps two jobs apart,
        # but no stranger out.
        server = Server(f"{address}:{port}", f"{_slurm_ids(os.environ)} {port}")
        if world.rank == 0:
            serve_beside(world, port, server.key)
    ranks.connect(world, server, answer_s=timeout_s)


def address_of_rank_0(world: World, env: Mapping[str, str]) -> tuple[str, int]:
    """Where the ranks expect rank 0: by the user's MASTER_ADDR and MASTER_PORT, else by Slurm's variables.

    Slurm's port is computed from job and step, because nothing can carry the number of a free port from rank
    0 to the others. It is in [16384, 32767], below the ports that Linux gives to connections. Two steps on
    one host seldom get the same port.
    """
    address, port = env.get("MASTER_ADDR", ""), sockets.port_in(env)
    if world.launcher.name == "slurm":
        from mpiddp.hosts.names import expand_nodelist

        port = port or _FIRST_PORT + crc32(_slurm_ids(env).encode()) % _FIRST_PORT
        nodelist = env.get("SLURM_STEP_NODELIST", "")
        try:
            first, *others = [address] if address else expand_nodelist(nodelist)
        except ValueError as error:
            sentence = (
                f'SLURM_STEP_NODELIST="{shown(nodelist)}" is not that of a Slurm step: {error}.'
            )
            raise UserError(
                sentence, fix="start the job with srun, or set MASTER_ADDR and MASTER_PORT"
            ) from None
        address = first if address or others else LOOPBACK
    elif not (address and env.get("MASTER_PORT")):
        raise UserError(
            f"RANK={world.rank} and WORLD_SIZE={world.world_size} are set, but MASTER_ADDR and MASTER_PORT are not.",
            fix="set both, by which ranks without MPI find each other",
        )
    # Over several hosts, a name that leads to 127.0.1.1 on rank 0's own host is another address.
    is_on_one_host = world.local_world_size == world.world_size or address.startswith("127.")
    return sockets.resolve(address) if is_on_one_host else sockets.resolve_own(address), port


def _slurm_ids(env: Mapping[str, str]) -> str:
    return f"{env.get('SLURM_JOB_ID', '')} {env.get('SLURM_STEP_ID', '')}"


def _serve_beside_agent(world: World, timeout_s: float) -> Server:
    """Rank 0 writes into the store of torchrun's agent where it serves the channel."""
    from mpiddp.runtime.rendezvous.store import connect_to_store, prefix_of_attempt

    store = connect_to_store(world, timeout_s)
    name = f"{prefix_of_attempt()}/channel"
    if world.rank == 0:
        store.set(name, " ".join(serve_beside(world)))
    try:
        address, key = store.get(name).decode().split()
        return Server(address, key)
    except RuntimeError:
        raise JobFailed(
            f"rank {world.rank} on {world.hostname}: no answer from rank 0 in {timeout_s:g} s."
        ) from None
