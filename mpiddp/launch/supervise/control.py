"""The launcher's end of the job channel: where it listens, what it asks of the ranks, and who waits for it.

It listens on one address only. `mpiddp.protocol.server` handles the connections and the protocol.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections import Counter
from pathlib import Path

from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.supervise.phases import Event
from mpiddp.launch.supervise.signals import AwakeSelector
from mpiddp.paths import cause_of, new_private_folder, remove_private_folder
from mpiddp.protocol.messages import CONFIRM_EVERY, UNIX
from mpiddp.protocol.server import PER_RANK, ChannelServer, Message, Peer
from mpiddp.protocol.variables import ADDRESS, SECRET

STACKS_S, INTERRUPTED_S = 4.0, 1.0  # ranks to send their stacks, also after an interrupt

_SIOCOUTQ = 0x5411  # bytes that the peer has not acknowledged yet


class ControlServer(ChannelServer):
    """The server for `world_size` ranks, on a free port of `address`. It registers with `selector`.

    Args:
        address: None for ranks on this host only: a Unix socket that only this user can open.

    Raises:
        UserError: it cannot listen on `address`.
        JobFailed: a machine failed.
    """

    def __init__(self, address: str | None, world_size: int, selector: AwakeSelector) -> None:
        self.selector = selector
        secret = os.urandom(16).hex()
        allow_open(2 * PER_RANK * world_size + OPEN_BESIDES)
        self._path: Path | None = None  # of a Unix socket
        self._progress: Counter[int] = Counter()  # messages of each rank
        if address is None:
            self._socket, self._path = _listen_here()
            shown = f"{UNIX}{self._path}"
        else:
            self._socket = _listen(address)
            host, port = self._socket.getsockname()[:2]
            shown = f"{host}:{port}"
        super().__init__(self._socket, secret, world_size, selector, selector.now)
        # The environment variables that the ranks need.
        self.settings = {ADDRESS: shown, SECRET: secret}

    def close(self) -> None:
        super().close()
        self._socket.close()
        if self._path is not None:
            _remove(self._path)

    @property
    def next_in_s(self) -> float:
        """Seconds until `expire` has something to answer, infinity if nothing waits."""
        return self.next_deadline - self.selector.now()

    def end_all(self, code: int) -> None:
        """Tell every connected rank, and its script, to end."""
        self.send_all("end", code=code)

    def request_stacks(self) -> None:
        """Request the stacks of every connected rank."""
        for rank in self.connected:
            self.send(rank, "stacks", to_script=rank in self._scripts)

    def request_stop(self, rank: int) -> None:
        """Request a stop of the rank, if it is connected."""
        if rank in self._scripts:
            self.send(rank, "stop", to_script=True)
            self.send(rank, "stopping")
        else:
            self.send(rank, "stop")

    def confirm(self, progress: Message) -> None:
        """Tell a rank now and then that its progress is read. Without this, it falls silent."""
        self._progress[progress.rank] += 1
        if self._progress[progress.rank] % CONFIRM_EVERY == 0:
            self.send(progress.rank, "received", to_script=progress.from_script)

    def interrupt(self, rank: int) -> None:
        """Request the stacks of a rank whose script does not answer: its agent interrupts it."""
        self.send(rank, "stacks")

    def drop_silent_hosts(self) -> list[Message]:
        """Drop the ranks whose hosts have not acknowledged what was sent to them."""
        if self._path is not None:  # this host's own kernel always answers
            return []
        silent = [peer for peer in self._ranks.values() if _is_silent(peer)]
        return [message for peer in silent for message in self.lose(peer, silent=True)]


class StackRequests:
    """The events that wait for stacks: until every rank has sent them, or the time is over."""

    def __init__(self, ranks: Ranks, server: ControlServer) -> None:
        self._ranks = ranks
        self._server = server
        self._waiting: list[Event] = []
        self._missing: set[int] = set()  # the ranks that have been asked and have not answered

    def request(self, event: Event) -> None:
        """Let the event wait for new stacks. One that waits already goes on waiting."""
        if event in self._waiting:
            return
        self._ranks.forget_stacks()
        self._server.request_stacks()
        self._missing = self._server.connected - self._ranks.done.keys()
        self._waiting.append(event)
        # The older timers are those of an older question, whose answers have just been forgotten.
        self._server.selector.cancel(Event.STACKS_LATE, Event.STACKS_OVER)
        self._server.selector.after(STACKS_S, Event.STACKS_LATE)
        self._server.selector.after(STACKS_S + INTERRUPTED_S, Event.STACKS_OVER)

    def interrupt(self, *, but_for: set[Event]) -> None:
        """Interrupt the system calls of ranks that have not answered, unless only these events wait."""
        if set(self._waiting) - but_for:
            for rank in self._missing & self._server.connected:
                self._server.interrupt(rank)

    def note(self, message: Message) -> None:
        """A rank has sent its stacks, or has ended. Of a script, only an early exit is the rank's end."""
        ends = ("stacks", "exited") if message.from_script else ("stacks", "exited", "done", "lost")
        if message.kind in ends:
            self._missing.discard(message.rank)

    @property
    def are_complete(self) -> bool:
        """Whether an event waits, and no stack is missing."""
        return bool(self._waiting) and not self._missing

    def take(self) -> list[Event]:
        """The events, whose wait is over."""
        self._server.selector.cancel(Event.STACKS_LATE, Event.STACKS_OVER)
        events, self._waiting = self._waiting, []
        return events


def _is_silent(peer: Peer) -> bool:
    """Whether its host has not acknowledged what was sent to it over TCP."""
    return any(fcntl.ioctl(peer.connection, _SIOCOUTQ, bytes(4)))


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise cause_of(error)(
            f"cannot listen on {address} of this machine ({error.strerror}). "
            "Name another interface: --interface NAME"
        ) from None


def _listen_here() -> tuple[socket.socket, Path]:
    """A Unix socket in a folder that only this user can open. Its path is short: at most 107 bytes count."""
    try:
        path = new_private_folder(Path("/tmp")) / "control"
    except OSError as error:
        raise cause_of(error)(f"cannot create a folder in /tmp ({error.strerror}).") from None
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        _remove(path)
        raise cause_of(error)(f"cannot listen at {path} ({error.strerror}).") from None
    return listener, path


def _remove(path: Path) -> None:
    """Remove the socket, if there is one, and its folder."""
    remove_private_folder(path.parent)
