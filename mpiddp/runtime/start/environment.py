"""The environment variables that a script finds in a joined rank: those of torchrun, and the network.

Under torchrun itself its own variables stay as they are.
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
from pathlib import Path

from mpiddp.protocol.variables import (
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    MAX_RESTARTS,
    RESTART_COUNT,
    RUN_ID,
)
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.world import World


def export(result: RendezvousResult, channel: JobChannel | None) -> None:
    """Set the variables in os.environ. What the script starts may join over the channel.

    TORCHELASTIC_USE_AGENT_STORE stays unset: with it, `init_method="tcp://…"` on another port would wait
    for a store that nobody serves.
    """
    world, env = result.world, os.environ
    env.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.local_rank),
        WORLD_SIZE=str(world.world_size),
        LOCAL_WORLD_SIZE=str(world.local_world_size),
        GROUP_RANK=str(world.node_rank),
        MASTER_ADDR=str(world.master_addr),
        MASTER_PORT=str(world.master_port),
    )
    if channel is not None:
        server = channel.server.for_children()
        env.update({CHANNEL: server.address, CHANNEL_SECRET: server.key})
    if world.launcher.name != "torchrun":
        env.update(_elastic_variables(world, result.run_id))
    if result.interface:
        # gloo uses the address of the host's own name, which Debian maps to 127.0.1.1; NCCL uses the
        # first interface that it finds suitable. With "=", NCCL matches the whole name, not a prefix.
        env.setdefault("GLOO_SOCKET_IFNAME", result.interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={result.interface}")


def _elastic_variables(world: World, run_id: str) -> dict[str, str]:
    return {
        RUN_ID: run_id,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": os.environ.get(RESTART_COUNT, "0"),
        "TORCHELASTIC_MAX_RESTARTS": os.environ.get(MAX_RESTARTS, "0"),
        "GROUP_WORLD_SIZE": str(world.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.world_size),
        ERROR_FILE: str(_error_file(world.rank)),
    }


def _error_file(rank: int) -> Path:
    """A new file of this rank, into which torch.distributed's `@record` writes the script's error.

    No other user of the host can guess its name, and so create it before.
    """
    file = Path(tempfile.gettempdir(), f"mpiddp-{secrets.token_hex(16)}-{rank}-error.json")
    atexit.register(file.unlink, missing_ok=True)
    return file
