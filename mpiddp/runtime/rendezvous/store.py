"""torch's store: process groups connect to it. By hand, and in a command, rank 0 serves it itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import current
from mpiddp.world import World

if TYPE_CHECKING:  # a script that imports torch is served before its next line
    from torch.distributed import Store


class StoreOfJob(NamedTuple):
    """Where torch's store of this job is, whatever the script writes into MASTER_ADDR later.

    The script asks for it at `place`, which is MASTER_ADDR and MASTER_PORT. It listens at another port, so that
    a program which the script starts can have a store of its own there.
    """

    place: tuple[str, int]
    port: int
    world_size: int


def serve_store(env: Mapping[str, str], listener: int) -> Store:
    """Serve the store at MASTER_ADDR, where the file `listener` listens, as long as the result lives.

    `multi_tenant` lets an env:// or tcp:// init in rank 0's process use this server too.
    """
    address, port, world_size = (env[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    return _open(address, int(port), int(world_size), is_master=True, master_listen_fd=listener)


def _open(address: str, port: int, world_size: int, **options: Any) -> Store:
    from torch.distributed import TCPStore

    return TCPStore(address, port, world_size, wait_for_workers=False, multi_tenant=True, **options)


def store_of_group(coordinator: Coordinator, timeout_s: float) -> Store:
    """The store of a new process group of all ranks. All ranks must call this."""
    from torch.distributed import HashStore, PrefixStore

    world = coordinator.world
    name = coordinator.unique_prefix("group")
    if world.world_size == 1:
        return HashStore()
    store = connect_to_store(world, timeout_s)
    return PrefixStore(f"{prefix_of_attempt()}/{coordinator.group}/{name}", store)


def connect_to_store(world: World, timeout_s: float) -> Store:
    """The store that rank 0, or torchrun's agent, serves."""
    address, port, of_job = str(world.master_addr), world.master_port or 0, current().store
    try:
        return _open(address, port, world.world_size, timeout=timedelta(seconds=timeout_s))
    except RuntimeError:
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach torch's store of rank 0 at "
            f"{address} port {of_job.port if of_job else port} in {timeout_s:g} s.",
            fix="check that rank 0 is running, that no firewall blocks the port, and that no other program has it",
        ) from None


def prefix_of_attempt() -> str:
    """Of the keys of this attempt.

    torchrun's store outlives the workers. Restarted workers must not read the keys of the earlier ones.
    """
    return f"mpiddp/{current().env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
