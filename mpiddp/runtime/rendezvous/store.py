"""torch's store: rank 0 serves it on a socket that is already bound, and the others connect."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from mpiddp.errors import JobFailed
from mpiddp.hosts.sockets import OPEN_BESIDES, SOCKETS_PER_RANK, allow_open
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
