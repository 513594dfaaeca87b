"""A server of the job channel for tests, and members of it."""

import socket
from collections.abc import Mapping, Sequence

from mpiddp.protocol.channel import RANK
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.progress import BY_CALLS
from mpiddp.world import World


def progress(step: int, *, own_s: float = 0.0, counter: int = BY_CALLS) -> dict[str, int | float]:
    """The facts of a message "progress"."""
    return {"step": step, "counter": counter, "own_s": own_s, "cpu_s": own_s, "memory": 1 << 30}


def calls(
    groups: Mapping[str, tuple[list[int] | None, Sequence[tuple[int, str, float, bool]]]],
    now: float,
    skew_s: float = 0.0,
) -> dict[str, object]:
    """The facts of a message "calls": the ranks of each group; each call's number, kind, time and end."""
    facts = []
    for name, (ranks, made) in groups.items():
        kinds = sorted({kind for _, kind, _, _ in made})
        told = [[n, kinds.index(k), int((at + skew_s) * 1e6), over] for n, k, at, over in made]
        facts.append({"name": name, "ranks": ranks, "kinds": kinds, "calls": told})
    return {"now_us": int((now + skew_s) * 1e6), "groups": facts}


def member(server: Server, rank: int, world_size: int) -> Coordinator:
    """A rank, whose messages a thread reads."""
    world = World(rank, world_size, rank, world_size)
    channel = connect(server, world)
    channel.listen(lambda facts: None)
    return channel


def connect(server: Server, world: World, role: str = RANK) -> Coordinator:
    """A member that has connected. Nobody reads its messages yet."""
    channel = Coordinator(world)
    channel.connect(world, server, role)
    return channel


def cut(rank: Coordinator) -> None:
    """End the connection of a member."""
    assert rank.connection is not None
    rank.connection.shutdown(socket.SHUT_RDWR)
