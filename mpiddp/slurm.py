"""Where rank 0 of a Slurm step listens, when srun started the ranks and no MPI carries the word.

Every task computes the same address and port from the step's own variables, so nothing is asked.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from mpiddp.address import LOOPBACK
from mpiddp.errors import UserError
from mpiddp.network import interfaces
from mpiddp.world import World


def slurm_address(world: World, env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Master address and port of this step. MASTER_ADDR and MASTER_PORT of the user are honoured.

    The port is derived from job and step, in [20000, 52767]: nothing can carry a free one from rank 0
    to the others, and two steps of one host seldom meet on the same.
    """
    env = os.environ if env is None else env
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env["SLURM_STEP_ID"])
    port = int(env.get("MASTER_PORT", 20000 + (job * 31 + step) % 32768))
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if world.world_size == world.local_world_size:
        return LOOPBACK, port
    host = first_host(env.get("SLURM_STEP_NODELIST", ""))
    return (_own_address(host) if world.rank == 0 else _resolve(host)), port


def first_host(nodelist: str) -> str:
    """The first name of Slurm's compressed list: "gpu[07-09,12],login" begins with gpu07."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?", nodelist)
    if match is None:
        raise UserError(f'SLURM_STEP_NODELIST="{nodelist}" names no host. Set MASTER_ADDR.')
    return match[1] + (match[2] or "")


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise UserError(
            f"{host}: cannot be resolved from {socket.gethostname()}. "
            "Add it to DNS or /etc/hosts, or set MASTER_ADDR."
        ) from None


def _own_address(host: str) -> str:
    """What the others resolve `host` to: not the 127.0.1.1 that Debian gives a host's own name."""
    address = _resolve(host)
    if not address.startswith("127."):
        return address
    own = [i.address for i in interfaces() if not i.is_loopback and not i.is_virtual]
    if not own:
        raise UserError(f"{host} has no address that other hosts could reach. Set MASTER_ADDR.")
    return own[0]
