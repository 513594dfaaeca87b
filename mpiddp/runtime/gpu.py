"""The GPUs and the threads of this rank, which torch reads when it is imported; and what the GPUs do meanwhile."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mpiddp.errors import aid
from mpiddp.hosts.gpus import CHANGING, chosen_gpus, hides_all_gpus, is_part, read_gpus
from mpiddp.hosts.processes import cores_of_group, group_of
from mpiddp.protocol.variables import GPUS, PLACEMENT
from mpiddp.world import World

EVERY_S, LIMIT_S = 10.0, 5.0  # of the readings


def prepare(world: World) -> None:
    hosts = expected_hosts(os.environ.get(PLACEMENT, ""))
    if text := os.environ.get(GPUS):  # the variables that the launcher has for each host
        of_hosts = json.loads(text)
        os.environ.update(of_hosts[list(dict.fromkeys(hosts)).index(hosts[world.rank])])
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if is_part(names[0]) and len(names) > 1:  # each rank sees a part of its own
        local_rank = hosts[: world.rank].count(hosts[world.rank]) if hosts else world.local_rank
        os.environ["CUDA_VISIBLE_DEVICES"] = names[(local_rank or 0) % len(names)]
    limit_threads(world)


def limit_threads(world: World) -> int | None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS is set.

    torch sizes its thread pools when it is imported. A rank that mpirun has bound to some cores uses at
    most that many threads, and a container has the cores of its quota. Returns None if the user decides, or
    until the local ranks are counted.
    """
    if world.local_world_size is None or "OMP_NUM_THREADS" in os.environ:
        return None
    share = int(cores_of_group(group_of(of="cpu"))) // world.local_world_size
    threads = max(1, min(share, len(os.sched_getaffinity(0))))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    return threads


def expected_hosts(placement: str) -> list[str]:
    """The host of each rank: [world_size]. "node1:4,[fd00::1]:2" has ranks 4 and 5 on fd00::1."""
    hosts: list[str] = []
    for part in filter(None, placement.split(",")):
        name, _, count = part.rpartition(":")
        hosts += [name.strip("[]")] * int(count)
    return hosts


@contextmanager
def reading_gpus(
    ranks: Sequence[int], env: Mapping[str, str], send: Callable[..., None]
) -> Iterator[None]:
    """In the body, send the launcher the readings of the `ranks` of this host, in their order.

    A thread starts the vendor's tool every ten seconds. The first failure ends it: a tool that is missing,
    hangs, or tells nothing of the ranks' GPUs, is not asked again.
    """
    is_over = threading.Event()

    @aid("readings of the GPUs")
    def read() -> None:
        while not (hides_all_gpus(env) or is_over.wait(EVERY_S)):
            gpus = read_gpus(env.get("PATH"), timeout_s=LIMIT_S) or []
            rows = [
                {"rank": rank, **{name: getattr(gpus[number], name) for name in CHANGING}}
                for rank, number in zip(ranks, chosen_gpus(gpus, env), strict=False)
                if number is not None  # the GPU is known, see `process_group.device_of`
            ]
            if all(row[name] is None for row in rows for name in CHANGING if name != "slowed"):
                return
            send("gpus", ranks=rows)

    thread = threading.Thread(target=read, daemon=True)
    aid("readings of the GPUs")(thread.start)()
    yield
    is_over.set()
    if thread.is_alive():
        thread.join(LIMIT_S)  # then no tool runs that would be taken for a process of the script
