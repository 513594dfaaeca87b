"""The server of the job channel where no launcher listens: a process beside rank 0.

It is a process, because native code of rank 0 may hold Python's lock for minutes, and a failure must reach
the other ranks meanwhile. It needs the standard library alone, and starts while rank 0 loads torch and MPI.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.protocol.server import PER_RANK, ChannelServer

# A batch system and a terminal signal every process of a job, and the ranks may still save.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LAST_S = 5.0  # in which the ranks end that have learned that rank 0 is gone
_ACCEPT_AGAIN_S = 1.0  # until a machine without files is asked again
_NEVER = float("inf")

# Without `site`, whose .pth files may cost more than this process.
_CODE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from mpiddp.runtime.rendezvous.channel_process import main; main()"
)


class ChannelProcess:
    """The process of rank 0. It ends by itself if this process ends before `serve`."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(Path(__file__).parents[3])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,  # mpirun waits for the end of a rank's own streams
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        # It forks, and the child serves: a script that waits for all of its children must not wait for it.
        threading.Thread(target=process.wait, daemon=True).start()

    def serve(self, listener: socket.socket, key: str, world_size: int) -> None:
        """Serve the job channel on `listener`, which this process then closes, until all ranks have left.

        The end of that process ends the job, unless rank 0 has left before.
        """
        with self._control, listener:
            # All users of the host see a command line, so the key is not there.
            facts = json.dumps({"key": key, "world_size": world_size}).encode()
            socket.send_fds(self._control, [facts], [listener.fileno()])


def main() -> None:
    """Serve what rank 0 sends over stdin."""
    if os.fork():
        os._exit(0)
    with socket.socket(fileno=0) as control:
        message, files, _, _ = socket.recv_fds(control, 1024, 1)
    if not message:  # rank 0 has ended
        return
    facts = json.loads(message)
    allow_open(PER_RANK * facts["world_size"] + OPEN_BESIDES)
    with socket.socket(fileno=files[0]) as listener, selectors.DefaultSelector() as selector:
        serve(ChannelServer(listener, facts["key"], facts["world_size"], selector), selector)


def serve(server: ChannelServer, selector: selectors.BaseSelector) -> None:
    """Serve until rank 0 is gone, and all other members with it or soon after."""
    has_left = is_gone = False
    ends_at = accepts_again_at = _NEVER
    while not (is_gone and not server.has_members) and time.monotonic() < ends_at:
        deadline = min(server.next_deadline, ends_at, accepts_again_at)
        wait_s = None if deadline == _NEVER else max(0.0, deadline - time.monotonic())
        was_there = not is_gone
        for key, _ in selector.select(wait_s):
            for message in server.receive(key.data):
                if "connection" in message.facts:  # only a launcher takes output
                    message.facts["connection"].close()
                elif message.kind == "full":
                    accepts_again_at = time.monotonic() + _ACCEPT_AGAIN_S
                elif message.rank or message.from_script:
                    pass
                elif message.kind == "leave":
                    has_left = True
                elif message.kind == "lost":
                    is_gone = True
        if is_gone and was_there and not has_left:
            # It serves torch's store, without which the others form no process group.
            server.send_all("lost")
            ends_at = time.monotonic() + _LAST_S
        if time.monotonic() >= accepts_again_at:
            accepts_again_at = _NEVER
            server.accept_again()
        server.expire()
