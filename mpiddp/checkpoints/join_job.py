"""How a script becomes a rank that saves: it joins its job, if it has not joined before."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch.distributed as dist

from mpiddp.errors import UserError
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import script_session
from mpiddp.runtime.join import at_exit, enter_until_exit, join
from mpiddp.runtime.rank_log import log_to_console
from mpiddp.world import World


def script_coordinator(finish: Callable[[], None]) -> Coordinator:
    """The coordinator of this process. All ranks must call this: they join, unless they have joined before.

    `finish` is called on every rank once its script has succeeded. Its error ends the process with code 1.
    """
    session = script_session()
    world = World.from_env()
    if not session.is_member and world.launcher.name == "none":
        log_to_console(0)
        at_exit(finish)
        alone = Coordinator(world._replace(node_rank=0, num_nodes=1))
        alone.hostnames = (socket.gethostname(),)
        return alone
    if not session.is_member:
        has_store = session.coordinator.connection or os.environ.get(AGENT_STORE) == "True"
        if dist.is_initialized() and not has_store:
            raise UserError(
                "mpiddp.Checkpoints comes after init_process_group, so the two would have no common store.",
                fix="create it before, or start the script with mpiddp run or torchrun",
            )
        enter_until_exit(join(world))
    session.before_leaving.append(finish)
    return session.coordinator
