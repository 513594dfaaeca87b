"""The address of rank 0 in a Slurm step, if srun starts the ranks and no MPI carries messages.

Every task computes the same address and port from the variables of the step, without any message.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpiddp.errors import UserError
from mpiddp.hosts.slurm_nodelist import expand_nodelist
from mpiddp.hosts.sockets import port_in
from mpiddp.runtime.master_address import LOOPBACK
from mpiddp.world import World


def slurm_address(world: World, env: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host and port in this step. The user's MASTER_ADDR and MASTER_PORT are honoured.

    The port is computed from job and step, in [20000, 52767], because nothing can carry the number of a
    free port from rank 0 to the others. Two steps on one host seldom get the same port.

    Raises:
        UserError: MASTER_PORT is not a port, or the step's variables name no host.
    """
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env["SLURM_STEP_ID"])
    port = port_in(env) or 20000 + (job * 31 + step) % 32768
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if world.world_size == world.local_world_size:
        return LOOPBACK, port
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    if not nodelist:
        raise UserError("SLURM_STEP_NODELIST names no host. Set MASTER_ADDR.")
    return expand_nodelist(nodelist)[0], port
