"""The launcher's end of the job channel: where it listens, what it asks of the ranks, and who waits for it.

It listens on one address only. `mpiddp.protocol.server` handles the connections and the protocol.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.launch.events import TimedSelector
from mpiddp.paths import cause_of
from mpiddp.protocol.messages import UNIX
from mpiddp.protocol.server import PER_RANK, ChannelServer, Message
from mpiddp.protocol.variables import ADDRESS, SECRET

_SIOCOUTQ = 0x5411  # bytes that the peer has not acknowledged yet


class ControlServer(ChannelServer):
    """The server for `world_size` ranks. It registers with `selector`.

    Args:
        where: an address of this machine, of which it takes a free port; for ranks on this host only, the
            path of a Unix socket in a folder that only this user can open.

    Raises:
        UserError: it cannot listen there.
        JobFailed: a machine failed.
    """

    def __init__(self, where: str | Path, world_size: int, selector: TimedSelector) -> None:
        self.selector = selector
        secret = os.urandom(16).hex()
        allow_open(2 * PER_RANK * world_size + OPEN_BESIDES)
        self._is_local = isinstance(where, Path)
        try:
            if isinstance(where, Path):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(str(where))
                self._socket.listen(1024)
                shown = f"{UNIX}{where}"
            else:
                family = socket.AF_INET6 if ":" in where else socket.AF_INET
                self._socket = socket.create_server((where, 0), family=family, backlog=1024)
                shown = "{}:{}".format(*self._socket.getsockname()[:2])
        except OSError as error:
            raise _cannot_listen(where, error) from None
        super().__init__(self._socket, secret, world_size, selector)
        self.settings = {ADDRESS: shown, SECRET: secret}  # the variables that the ranks need

    def close(self) -> None:
        super().close()
        self._socket.close()

    def request_stacks(self) -> None:
        """Request the stacks of every connected rank: of its script, if that talks to this server itself."""
        for rank in self.connected:
            self.send(rank, "stacks", to_script=rank in self._scripts)

    def request_stop(self, rank: int) -> None:
        """Request a stop of the rank, if it is connected."""
        if rank in self._scripts:
            self.send(rank, "stop", to_script=True)
            self.send(rank, "stopping")
        else:
            self.send(rank, "stop")

    def drop_silent_hosts(self) -> list[Message]:
        """Drop the ranks whose hosts have not acknowledged over TCP what was sent to them."""
        if self._is_local:  # this host's own kernel always answers
            return []
        silent = [
            peer
            for peer in self._ranks.values()
            if any(fcntl.ioctl(peer.connection, _SIOCOUTQ, bytes(4)))
        ]
        return [message for peer in silent for message in self.lose(peer, silent=True)]


def _cannot_listen(where: str | Path, error: OSError) -> UserError | JobFailed:
    of = "" if isinstance(where, Path) else " of this machine"
    hint = "" if isinstance(where, Path) else " Name another interface: --interface NAME"
    return cause_of(error)(f"cannot listen on {where}{of} ({error.strerror}).{hint}")
