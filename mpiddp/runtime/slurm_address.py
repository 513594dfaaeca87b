"""The address of rank 0 in a Slurm step, if srun starts the ranks and no MPI carries messages.

Every task computes the same address and port from the variables of the step, without any message.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpiddp.errors import UserError
from mpiddp.hosts.slurm import expand_nodelist
from mpiddp.hosts.sockets import port_in
from mpiddp.runtime.master_address import LOOPBACK
from mpiddp.text import parse_whole, shown
from mpiddp.world import World


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
