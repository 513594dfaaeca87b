"""torch's store for the commands of a job, served by a process beside rank 0's.

The ranks of a command do without torch, and its store needs torch. The process imports it while the commands
start, and the kernel lets them connect meanwhile.

    python -m mpiddp.runtime.rendezvous.store_process ADDRESS PARENT FILE PORT WORLD_SIZE
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading

from mpiddp.errors import FAILED, UserError, missing_package
from mpiddp.hosts.processes import signal_at_parents_end
from mpiddp.runtime.job.ending import Ending
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.job.stop import PASSED
from mpiddp.world import World


def serve_commands(world: World, listener: socket.socket, session: Session) -> None:
    """Start the process, on rank 0. It ends with this process, and this process ends if it fails.

    Raises:
        UserError: this host has no torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(missing_package("the store that rank 0 serves for the commands", "torch"))
    with listener:
        numbers = (os.getpid(), listener.fileno(), world.master_port, world.world_size)
        arguments = [str(world.master_addr), *map(str, numbers)]
        # A batch system signals every process of a job, and the commands still save: it inherits this mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,  # its end is the end of this process
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    threading.Thread(target=_watch, args=(process, world, session), daemon=True).start()


def _watch(process: subprocess.Popen[bytes], world: World, session: Session) -> None:
    code = process.wait()
    rank = f"rank {world.rank} on {world.hostname}"
    sentence = f"{rank}: the process that serves torch's store ended with code {code}."
    session.report(Ending(FAILED, sentence, is_verdict=True))
    if session.launcher is None:
        os.write(2, f"{sentence}\n".encode())
    session.exit_now(FAILED)


def _main(address: str, parent: int, file: int, port: int, world_size: int) -> None:
    signal_at_parents_end(signal.SIGKILL)  # at once, even while torch loads
    if os.getppid() != parent:
        return
    from mpiddp.runtime.rendezvous.store import no_dns, serve_store

    world = World(0, world_size, 0, 1, master_addr=address, master_port=port)
    with no_dns():
        store = serve_store(world, socket.socket(fileno=file))
        os.read(0, 1)
        del store


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
