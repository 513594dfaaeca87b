"""torch's store for the commands of a job, served by a process beside rank 0's.

The ranks of a command do without torch (`mpiddp.runtime.rendezvous.plain_store`), and its store needs torch.
The process imports it while the commands start, and the kernel lets them connect meanwhile.

    python -m mpiddp.runtime.rendezvous.torch_store ADDRESS PARENT FILE PORT WORLD_SIZE
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from mpiddp.errors import FAILED, JobFailed, UserError
from mpiddp.hosts.processes import signal_at_parents_end
from mpiddp.hosts.sockets import OPEN_BESIDES, SOCKETS_PER_RANK, allow_open, bind
from mpiddp.runtime.job.child_signals import PASSED
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Ending
from mpiddp.runtime.job.session import current
from mpiddp.runtime.rendezvous.plain_store import PlainServer, PlainStore
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.world import World

if TYPE_CHECKING:
    from torch.distributed import Store


def serve_commands(
    result: RendezvousResult, timeout_s: float
) -> tuple[Coordinator, RendezvousResult]:
    """Connect all ranks without torch, and serve torch's store for their commands.

    Returns:
        The coordinator of the ranks, and the result with the port of torch's store.

    Raises:
        NoAnswer, SystemExit: see `Coordinator`.
    """
    world = result.world
    assert world.master_addr is not None
    assert world.master_port is not None
    if result.listener is not None:
        allow_open(SOCKETS_PER_RANK * world.world_size + OPEN_BESIDES)
        PlainServer(result.listener)
    try:
        store = PlainStore(world.master_addr, world.master_port)
    except RuntimeError as error:
        raise JobFailed(f"rank {world.rank} on {world.hostname}: {error}.") from None
    coordinator = Coordinator(world, cast("Store", store), result.store_secret)
    coordinator.all_gather_json(None, timeout_s=timeout_s)
    port = 0
    with coordinator.all_or_none():
        if world.rank == 0:
            if importlib.util.find_spec("torch") is None:
                raise UserError(
                    f"{sys.executable} on {world.hostname} has no torch, whose store rank 0 serves."
                )
            port = _start(world.master_addr, world)
    world = replace(world, master_port=coordinator.broadcast_json(port))
    return coordinator, replace(result, world=world)


def _start(address: str, world: World) -> int:
    """Start the process. Returns its port. It ends with this process, and this process ends if it fails."""
    with bind(address, 0, world.hostname) as listener:
        port: int = listener.getsockname()[1]
        numbers = (os.getpid(), listener.fileno(), port, world.world_size)
        arguments = [address, *map(str, numbers)]
        # A batch system signals every process of a job, and the commands still save: it inherits this mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,  # its end is the end of this process
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    threading.Thread(target=_watch, args=(process, world), daemon=True).start()
    return port


def _watch(process: subprocess.Popen[bytes], world: World) -> None:
    code = process.wait()
    rank = f"rank {world.rank} on {world.hostname}"
    sentence = f"{rank}: the process that serves torch's store ended with code {code}."
    session = current()
    session.report(Ending(FAILED, sentence, is_verdict=True))
    if session.channel is None:
        os.write(2, f"{sentence}\n".encode())
    session.exit_now(FAILED)


def _main(address: str, parent: int, file: int, port: int, world_size: int) -> None:
    signal_at_parents_end(signal.SIGKILL)  # at once, even while torch loads
    if os.getppid() != parent:
        return
    from mpiddp.runtime.rendezvous.name_service import no_dns
    from mpiddp.runtime.rendezvous.store import serve_or_join

    world = World(0, world_size, 0, 1, master_addr=address, master_port=port)
    with no_dns():
        store = serve_or_join(world, socket.socket(fileno=file), timeout_s=60.0)
        os.read(0, 1)
        del store


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
