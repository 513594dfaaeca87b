"""The launcher's signals, and its end of the job channel: a server for its ranks, and a socket for viewers.

Viewers are `mpiddp ps`, `top`, `stacks` and `stop`. `mpiddp.protocol.server` handles the connections.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from mpiddp.errors import JobFailed, cause_of
from mpiddp.hosts.processes import OPEN_BESIDES, allow_open
from mpiddp.protocol import channel
from mpiddp.protocol.channel import STOP_SIGNALS, encode
from mpiddp.protocol.group import Peer, TimedSelector
from mpiddp.protocol.server import PER_RANK, ChannelServer, Event
from mpiddp.protocol.variables import LOST_AFTER_S, PATIENCE
from mpiddp.text import escaped

# One request may arrive twice: for example, coreutils' timeout signals its child and then the child's process
# group. A person who presses Ctrl-C twice takes longer than 0.3 s.
_REPEAT_S, _REPEAT_OF_CTRL_C_S = 1.0, 0.3

_OPEN_BESIDES_RANKS = 64  # files


class SignalQueue:
    """STOP_SIGNALS, SIGCHLD and SIGWINCH until it is closed. Its file is readable when one has arrived.

    The kernel may deliver a signal to another thread. Python then runs no handler before the selector
    returns, but writes the number to `sender` at once.
    """

    def __init__(self) -> None:
        self._receiver, self.sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.counts = Counter[int]()  # how often each stop signal has arrived
        self._arrived_at: dict[int, float] = {}  # when it last arrived
        self.interrupts = False  # whether a stop signal raises KeyboardInterrupt
        self.has_resized = False  # whether the terminal has a new size, which the owner then clears
        # A signal that was ignored when this process started stays ignored, as SIGHUP under `nohup`.
        numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
        # What a Ctrl-C sends. The ranks ignore it as well if a shell has started all this in the background.
        self.of_ctrl_c = signal.SIGINT if signal.SIGINT in numbers else signal.SIGTERM
        self._wakeup = signal.set_wakeup_fd(self.sender, warn_on_full_buffer=False)
        numbers += (signal.SIGCHLD, signal.SIGWINCH)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._receiver)
        os.close(self.sender)

    def fileno(self) -> int:
        return self._receiver

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.interrupts and number in STOP_SIGNALS:
            raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a stop signal raise KeyboardInterrupt in the body, because it may block, as logins do."""
        self.interrupts = True
        try:
            yield
        finally:
            self.interrupts = False

    def receive(self) -> list[int]:
        """The new stop signals. A signal that soon follows an equal one is left out."""
        numbers, now, new = b"", time.monotonic(), []
        with suppress(BlockingIOError):
            numbers = os.read(self._receiver, 4096)
        for number in numbers:
            self.has_resized |= number == signal.SIGWINCH
            repeat_s = _REPEAT_OF_CTRL_C_S if number == signal.SIGINT else _REPEAT_S
            if number in STOP_SIGNALS and now - self._arrived_at.get(number, -repeat_s) >= repeat_s:
                self._arrived_at[number] = now
                self.counts[number] += 1
                new.append(number)
        return new

    def has_stop(self, within_s: float = 0.0) -> bool:
        """Whether one of STOP_SIGNALS has ever arrived, or arrives within `within_s`."""
        deadline = time.monotonic() + within_s
        while not (self.receive() or self.counts):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            select.select([self], [], [], left_s)
        return True


def listen(where: str | Path) -> socket.socket:
    """Listen on a free port of an address of this machine, or, for ranks on this host, on a Unix socket."""
    is_path = isinstance(where, Path)
    of_tcp = socket.AF_INET6 if ":" in str(where) else socket.AF_INET
    family, at = (socket.AF_UNIX, str(where)) if is_path else (of_tcp, (str(where), 0))
    try:
        return socket.create_server(at, family=family, backlog=1024)
    except OSError as error:
        fix = "" if is_path else "name another interface: --interface NAME"
        raise cause_of(error)(f"cannot listen on {where} ({error.strerror}).", fix=fix) from None


class ControlServer(ChannelServer):
    """The server for the `world_size` ranks of one attempt, whose owner loses hosts after `lost_s`."""

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        selector: TimedSelector,
        key: str = "",
        lost_s: float = LOST_AFTER_S,
    ) -> None:
        limit = allow_open(2 * PER_RANK * world_size + OPEN_BESIDES)
        if limit < PER_RANK * world_size + _OPEN_BESIDES_RANKS:
            needs = f"{world_size} ranks need {PER_RANK} each in this process"
            raise JobFailed(f"{limit} open files are too few: {needs} (ulimit -n).")
        name = listener.getsockname()
        self.address = channel.UNIX + name if isinstance(name, str) else "{}:{}".format(*name[:2])
        super().__init__(listener, key or os.urandom(16).hex(), world_size, selector)
        self.lost_s, self.patience_s = lost_s, PATIENCE * lost_s

    def successor(self) -> ControlServer:
        """The server of the next attempt of the same agents, at the same address and with a new key."""
        self.drop_all()
        key = channel.next_key(self.key)
        return ControlServer(self._listener, self.world_size, self.selector, key, self.lost_s)

    def ask(
        self, ranks: Iterable[int], kind: str, *, agents: bool = False, **facts: object
    ) -> None:
        """Send a message to the scripts of these ranks, or, where none is connected, to the agents.

        With `agents`, it goes to the agents of all these ranks.
        """
        line = encode(kind, b"", **facts)
        for rank in ranks:
            self.send(rank, line, to_script=rank in self.scripts and not agents)

    def silence(self) -> dict[int, float]:
        """The seconds since something came from the agent of each rank, or from its script."""
        pairs = {rank: (peer, self.scripts.get(rank, peer)) for rank, peer in self._ranks.items()}
        return {
            rank: min(channel.silence_s(peer.connection) for peer in pair)
            for rank, pair in pairs.items()
        }

    def lose_silent(self, silence: Mapping[int, float]) -> Iterator[Event]:
        """Drop the agents of these ranks, whose hosts have been silent for so many seconds."""
        for rank, silent_s in silence.items():
            yield from self.lose(self._ranks[rank], silent_s=silent_s)


class Console:
    """The socket for viewers, over all attempts. Without a name or a folder for it, the job runs unseen.

    A viewer asks for one of VIEWS, and gets one line.
    """

    def __init__(self, name: str = "") -> None:
        self._name = escaped(name).encode(errors="backslashreplace").decode()
        self._began_at = time.monotonic()
        self.listener: socket.socket | None = None
        self._opened = ExitStack()
        for beginning in channel.viewed_folders() if name else ():
            folder = Path(f"{beginning}{os.urandom(8).hex()}")
            with ExitStack() as stack, suppress(OSError):
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.mkdir(mode=0o700)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                (folder / channel.NAMED_AT).write_text(self._name, encoding="utf-8")
                listener = socket.create_server(
                    str(folder / "new"), family=socket.AF_UNIX, backlog=4096
                )
                stack.enter_context(listener).setblocking(False)
                # Last: viewers remove a dead socket.
                (folder / "new").rename(folder / channel.VIEWED_AT)
                self.listener, self._opened = listener, stack.pop_all()
                break
        self.close = self._opened.close

    def answer(self, viewer: Peer, **facts: object) -> None:
        """Send a viewer these facts, and the facts of the job itself."""
        age_s = time.monotonic() - self._began_at
        job = {"pid": os.getpid(), "name": self._name, "age_s": age_s}
        viewer.send(encode("answer", b"", **job, **facts))


class Exchange:
    """The function that every rank of `mpiddp.spawn` runs, and the answer of each rank.

        caller -> launcher   call, with the function        rank -> launcher   function, answer
        launcher -> caller   answer, outcome                launcher -> rank   function, answer

    A rank waits for an acknowledgement, so its answer arrives before its end is reported. The launcher never
    unpickles anything. Its caller and the ranks check the MAC before they unpickle.
    """

    def __init__(self, function: bytes = b"") -> None:
        self._function = function  # as `mpiddp.spawning.spawn.pickled_call` makes it
        self._mac = channel.mac("", "function", function)
        self.world_size = 0
        # The pickles of the latest attempt, in base64, by rank.
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, bytes] = {}

    def begin(self, server: ChannelServer) -> None:
        """Begin an attempt, with a new server. The answers of earlier attempts no longer count."""
        if self._function:  # the function and its results may have any size
            server.value_limit = sys.maxsize - channel.LINE_LIMIT
        self.world_size = server.world_size
        self.results, self.errors = {}, {}

    def take(self, event: Event, server: ChannelServer) -> None:
        """Send a rank the function, or take its answer."""
        rank, facts = event.rank, event.facts
        key = channel.member_key(server.key, channel.SCRIPT, rank)
        if event.kind == "function":
            line = encode("function", mac=channel.mac(key, self._mac))
            server.send(rank, line, self._function, to_script=True)
        elif facts["mac"] == channel.mac(key, "answer", facts["body"]):
            answers = self.results if facts["is_result"] else self.errors
            answers[rank] = facts["body"]
            server.send(rank, encode("answer"), to_script=True)
