"""The server of the job channel: its connections, its groups, and the messages for its owner.

The launcher has a server in its event loop, and so has the process beside rank 0 (`mpiddp.protocol.channel`).
A connection that does not prove that it belongs to the job, or that violates the protocol, is dropped without
a word. The server never waits for a connection.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mpiddp.errors import FAILED
from mpiddp.protocol import channel
from mpiddp.protocol.channel import decode, encode
from mpiddp.protocol.group import Claims, Group, Peer, TimedSelector
from mpiddp.protocol.variables import LOST_AFTER_S

LAUNCHER = -1  # the rank of an event of the launcher itself
PER_RANK = 3  # connections of a rank: its messages and its two streams
STRANGERS = 64  # connections without a proof, in addition to PER_RANK for each rank
_ACCEPTED_AT_ONCE = 64


@dataclass(frozen=True)
class Event:
    """A message of a rank, a change of its connection, or an act of the launcher.

    `kind` is a message of `channel.MESSAGES`, one of HANDED_OVER or VIEWS, an act of the launcher
    (`mpiddp.launch.judge.events`), or "lost", if the connection has ended. The facts of these kinds:

        answer           body: the pickle
        lost             silent: the seconds for which the host has not answered, or 0 if it answers;
                         is_forged: whether a line without the member's seal has ended the connection
        output, input    connection, which belongs to the receiver; "output" also has stream, 1 or 2, and host
        VIEWS            viewer: the peer that waits for the view

    A rank that sends "claim" reports its failure later. `at` is in time.monotonic()'s seconds. `from_script`
    says that the script of the rank has sent the message, and not its agent.
    """

    kind: str
    rank: int = LAUNCHER
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)
    from_script: bool = False


class ChannelServer:
    """The server for `world_size` ranks. It closes `listener`. Only the job's members have `key`."""

    # The bytes of the longest value, and the seconds of silence after which the kernel ends a connection. A
    # new value holds for new connections.
    value_limit, patience_s = channel.VALUE_LIMIT, LOST_AFTER_S

    def __init__(
        self, listener: socket.socket, key: str, world_size: int, selector: TimedSelector
    ) -> None:
        self.world_size, self.key = world_size, key
        self._listener, self.selector = listener, selector
        self._strangers: dict[Peer, None] = {}  # connections without a proof, the oldest first
        # Of the ranks, and of their n-th scripts: a rank may end before another one's first script connects.
        # An agent claims for a script without a connection, so the agents and the first scripts share a register.
        claims = Claims()
        self._groups = [Group(world_size, selector, claims) for _ in range(2)]
        self._ranks = self._groups[0].members
        self.connected = self._ranks.keys()  # the ranks that are connected now
        self.scripts: dict[int, Peer] = {}  # the scripts that are connected now, by rank
        self._num_scripts = [0] * world_size  # how many scripts each rank has had
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, listener)

    def close(self) -> None:
        self.drop_all()
        self.stop_listening()
        self._listener.close()

    def drop_all(self) -> None:
        """Close all connections, also of viewers that wait."""
        members = [peer for group in self._groups for peer in group.members.values()]
        for peer in (*self._strangers, *members):
            self._forget(peer).close()

    def stop_listening(self) -> None:
        """Accept no more connections. New ones wait in the kernel."""
        with suppress(KeyError):  # it has stopped
            self.selector.unregister(self._listener)

    @property
    def has_members(self) -> bool:
        """Whether any process that belongs to the job is connected."""
        return any(group.members for group in self._groups)

    def send(self, rank: int, line: bytes, value: bytes = b"", *, to_script: bool = False) -> None:
        """Send a message to a rank, or to its script, if it is connected. See `Peer.send`."""
        if (peer := (self.scripts if to_script else self._ranks).get(rank)) is not None:
            peer.send(line, value, channel.digest(value))

    def send_all(self, kind: str, **facts: object) -> None:
        line = encode(kind, b"", **facts)
        for peer in [*self.scripts.values(), *self._ranks.values()]:
            peer.send(line)

    def end_without(self, rank: int) -> None:
        """End the other ranks, because this rank is lost, unless they end already."""
        self._groups[0].receive(rank, "fail", {"code": FAILED, "lost": rank}, b"")

    def receive(self, data: object) -> list[Event]:
        """Handle a ready socket, by its data: a listener or a Peer. Returns the events for the owner."""
        if isinstance(data, socket.socket):
            self._accept(data)
            return []
        assert isinstance(data, Peer)
        if data.connection.fileno() < 0:  # closed since the selector returned it
            return []
        data.flush()
        events: list[Event] = []
        now = time.monotonic()
        try:
            chunk = data.connection.recv(channel.CHUNK)
            for line in data.lines.split(chunk):
                events += self._take(data, line, now)
                if events and "connection" in events[-1].facts:  # the rest is no message
                    return events
        except BlockingIOError:
            return []
        except OSError as error:
            has_answered = isinstance(error, ConnectionError)
            return self.lose(data, silent_s=0.0 if has_answered else self.patience_s)
        except channel.Forged:
            return events + self.lose(data, is_forged=True)
        except channel.NO_MESSAGE:
            chunk = b""
        return events if chunk else events + self.lose(data)

    def lose(self, peer: Peer, *, silent_s: float = 0.0, is_forged: bool = False) -> list[Event]:
        """Drop a connection that has ended, or whose host has been silent for so many seconds.

        is_forged: it has brought a line that is not of the member.
        """
        self._forget(peer).close()
        if peer.rank is None:
            return []
        self._groups[peer.group].lose(peer.rank)
        facts = {"silent": silent_s, "is_forged": is_forged}
        return [Event("lost", peer.rank, facts, from_script=peer.group > 0)]

    # --- connections ---

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except OSError:  # no connection waits, or it has closed already
                return
            # If there are too many strangers, the oldest makes room. A rank authenticates at once, so the
            # oldest is not a rank. A rank that is dropped all the same connects again.
            if len(self._strangers) >= PER_RANK * self.world_size + STRANGERS:
                self._forget(next(iter(self._strangers))).close()
            peer = Peer(connection, self.selector)
            self._strangers[peer] = None
            connection.setblocking(False)
            channel.notice_silence(connection, self.patience_s)
            self.selector.register(connection, selectors.EVENT_READ, peer)
            peer.send(encode("challenge", challenge=peer.challenge))

    def _take(self, peer: Peer, line: bytes, now: float) -> list[Event]:
        """Take a line. Raises one of NO_MESSAGE if it violates the protocol."""
        facts, value = decode(line, peer.seals and peer.seals.of_member)
        rank, kind = peer.rank, facts.pop("type")
        if rank is None:
            return self._introduce(peer, kind, facts, now)
        if not channel.is_valid(kind, facts) or bool(value) is not (kind in ("gather", "answer")):
            raise ValueError(kind)
        if kind in ("done", "exited") and not peer.group and rank not in self.scripts:
            # The rank has ended without a script, so no group of scripts waits for it.
            for group in self._groups[1:]:
                group.lose(rank)
        if kind in ("gather", "claim", "fail"):
            self._groups[peer.group].receive(rank, kind, facts, value)
            if kind != "claim":
                return []
        elif kind == "answer":
            facts["body"] = value
        return [Event(kind, rank, facts, now, from_script=peer.group > 0)]

    def _introduce(self, peer: Peer, kind: str, facts: dict[str, Any], now: float) -> list[Event]:
        """Admit a member, or hand over a connection. Raises one of NO_MESSAGE for any other peer."""
        peer.lines.limit = self.value_limit + channel.LINE_LIMIT
        # Only the launcher's user can open its Unix socket, because the folder is closed to others.
        if kind in channel.VIEWS and peer.connection.family == socket.AF_UNIX:
            return [Event(kind, facts={"viewer": peer}, at=now)]
        rank = facts["rank"]
        role = facts.get("role", channel.RANK) if kind == "hello" else channel.RANK
        key = channel.member_key(self.key, role, rank)
        # The time of this comparison reveals nothing, because every connection has another challenge.
        is_proved = facts["proof"] == channel.mac(key, f"member {peer.challenge}")
        is_role = role in (channel.RANK, channel.SCRIPT, channel.HOST)
        if not (is_proved and is_role and rank in range(self.world_size)):
            raise ValueError(rank)
        proof = channel.mac(key, f"server {facts['challenge']}")
        if kind in channel.HANDED_OVER:
            source = {name: facts[name] for name in ("stream", "host") if kind != channel.INPUT}
            if source.get("stream", 1) not in channel.STREAMS:
                raise ValueError(source)
            peer.send(encode("received", proof=proof))
            channel.notice_silence(peer.connection, self.patience_s, is_read_slowly=True)
            return [Event(kind, rank, {**source, "connection": self._forget(peer)}, now)]
        if role == channel.HOST:
            peer.send(encode("received", proof=proof))
            return []
        # A rank has one agent, and a script needs its agent.
        if kind != "hello" or (rank in self._ranks) is not (role == channel.SCRIPT):
            raise ValueError(rank)
        number = 0  # of its group: the ranks, or the n-th scripts of all ranks
        if role == channel.SCRIPT:
            if rank in self.scripts:
                peer.send(encode("taken"))
                raise ValueError("a second script")
            self.scripts[rank] = peer
            self._num_scripts[rank] += 1
            number = self._num_scripts[rank]
        if number == len(self._groups):
            self._groups.append(Group(self.world_size, self.selector))
        self._groups[number].members[rank] = peer
        peer.rank, peer.group = rank, number
        del self._strangers[peer]
        peer.send(encode("received", proof=proof, group=number))
        peer.seals = channel.seals(key, peer.challenge, facts["challenge"])
        self._groups[number].enter(rank)
        return []

    def _forget(self, peer: Peer) -> socket.socket:
        self._strangers.pop(peer, None)
        if peer.rank is not None:
            if peer.group:
                del self.scripts[peer.rank]
            del self._groups[peer.group].members[peer.rank]
        self.selector.unregister(peer.connection)
        return peer.connection
