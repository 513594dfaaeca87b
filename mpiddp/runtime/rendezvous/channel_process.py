"""The server of the job channel where no launcher listens: a process beside rank 0.

It is a process, because native code of rank 0 may hold Python's lock for minutes, and a failure must reach
the other ranks meanwhile. It needs the standard library alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from mpiddp.hosts.processes import OPEN_BESIDES, allow_open
from mpiddp.protocol.channel import STOP_SIGNALS
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.server import PER_RANK, ChannelServer
from mpiddp.runtime.rendezvous.sockets import bind
from mpiddp.world import World

_FIRST_S = 120.0  # rank 0 connects in this time, unless it is killed before
_LAST_S = 5.0  # the ranks end in this time once they have learned that rank 0 has ended

# Without `site`, whose .pth files may cost more than this process.
_CODE = "import sys; sys.path.append(sys.argv[1]); from mpiddp.runtime.rendezvous.channel_process import main; main()"


def serve_beside(world: World, port: int = 0, key: str = "") -> tuple[str, str]:
    """Serve the job channel at rank 0's address in `world` until all ranks have left.

    The end of rank 0, whose process this is, ends the job, unless it has left before. Returns the fields of
    its `Server`, by default any free port and a new key.
    """
    address, key = str(world.master_addr), key or os.urandom(16).hex()
    with bind(address, port, world.hostname) as listener:
        args = [str(Path(__file__).parents[3]), str(listener.fileno()), str(world.world_size)]
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CODE, *args],
            input=key.encode(),  # all users of the host see a command line
            stdout=subprocess.DEVNULL,  # mpirun waits for the end of a rank's own streams
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=True,
        )
        return f"{address}:{listener.getsockname()[1]}", key


def main() -> None:
    """Be the process of `serve_beside`: a child of it, for which no script waits."""
    # A batch system signals every process of a job, and the ranks may still save.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    key, file, world_size = sys.stdin.read(), int(sys.argv[2]), int(sys.argv[3])
    allow_open(PER_RANK * world_size + OPEN_BESIDES)
    with socket.socket(fileno=file) as listener, TimedSelector() as selector:
        serve(ChannelServer(listener, key, world_size, selector))


def serve(server: ChannelServer) -> None:
    """Serve until rank 0 has ended, and all other members with it or soon after.

    A rank that ends without leaving ends the others.
    """
    left: set[int] = set()
    has_ended = False
    server.selector.after(_FIRST_S, sys.exit)
    while server.has_members or not has_ended:
        for data in server.selector.ready():
            for message in server.receive(data):
                if "connection" in message.facts:  # only a launcher takes output
                    message.facts["connection"].close()
                elif message.from_script:
                    continue
                elif message.kind == "leave":
                    left.add(message.rank)
                elif message.kind == "lost":
                    has_ended |= message.rank == 0
                    if message.rank not in left:
                        server.end_without(message.rank)
        if 0 in server.connected:
            server.selector.cancel(sys.exit)
        elif has_ended and 0 not in left:
            left.add(0)
            server.selector.after(_LAST_S, sys.exit)
        for end_a_wait in server.selector.due():
            end_a_wait()
