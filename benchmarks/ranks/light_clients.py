"""Jobs of thousands of ranks without the ranks: one process speaks for all of them.

python -m benchmarks.ranks.light_clients launcher 1024      # prints the costs as JSON
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.launch.options import parse_options
from mpiddp.launch.supervise.attempt import Terms
from mpiddp.launch.supervise.run import run_attempt
from mpiddp.launch.supervise.signals import queued_signals
from mpiddp.protocol.messages import dumps, proof
from mpiddp.protocol.variables import ADDRESS, SECRET

STEPS = 5  # messages of progress of each rank
RANKS_PER_HOST = 8
WATCHED_S, ASK_EVERY_S = 10.0, 0.5
_SECRET = "a secret of the ranks"


def launcher(ranks: int) -> None:
    """Supervise `clients` as if they were an mpirun with so many ranks."""
    from mpiddp.hosts.hostfile import Host, Hosts
    from mpiddp.launch.starters.command import RankStarter, Request
    from mpiddp.launch.starters.table import STARTERS

    folder = os.environ["LIGHT_CLIENTS_FOLDER"]
    mpirun = Path(folder, "mpirun")
    mpirun.write_text(f"#!/bin/sh\nexec {sys.executable} -m {__spec__.name} clients {ranks}\n")
    mpirun.chmod(0o755)
    per_host = RANKS_PER_HOST if ranks >= RANKS_PER_HOST else 1
    hosts = tuple(Host(f"node{number}", ranks=per_host) for number in range(ranks // per_host))
    request = Request(Hosts("light clients", hosts), ("true",), ".")
    starter = RankStarter(STARTERS[1], "5.0.11", mpirun)
    since = time.monotonic()
    with queued_signals() as signals:
        outcome = run_attempt(Terms(parse_options(["--", "true"])), starter, request, signals)
    assert outcome.code == 0, outcome
    report(since)


def clients(ranks: int) -> None:
    """Join, report some steps and end, for every rank, over connections of their own."""
    allow_open(ranks + OPEN_BESIDES)
    host, _, port = os.environ[ADDRESS].rpartition(":")
    secret = os.environ[SECRET]
    connections = []
    for rank in range(ranks):
        connection = socket.create_connection((host, int(port)))
        challenge = json.loads(connection.recv(4096).split(b"\n")[0])["challenge"]
        connection.sendall(dumps("hello", rank=rank, proof=proof(secret, challenge, rank)))
        connections.append(connection)
    for rank, connection in enumerate(connections):
        connection.recv(4096)
        connection.sendall(
            dumps("started", host=f"node{rank // RANKS_PER_HOST}", pid=rank)
            + dumps("joining", timeout_s=600)
            + dumps("supports_stop")
        )
    for step in range(STEPS):
        message = dumps("progress", step=step)
        for connection in connections:
            connection.sendall(message)
    for connection in connections:
        connection.sendall(dumps("done"))
    for connection in connections:
        connection.close()


def rank_0(ranks: int) -> None:
    """The store and the coordinator of rank 0: two agreements, the end."""
    from torch.distributed import PrefixStore, TCPStore

    from mpiddp.runtime.job.coordinator import Coordinator
    from mpiddp.world import World

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = _start("others", ranks, store.port)
    before = resource.getrusage(resource.RUSAGE_SELF)
    since = time.monotonic()
    _let_begin(others)
    coordinator = Coordinator(
        World(0, ranks, 0, RANKS_PER_HOST), PrefixStore("mpiddp/0", store), _SECRET
    )
    for number in range(2):
        values = coordinator.all_gather_json([number, "equal"], timeout_s=600)
        assert len(values) == ranks
    coordinator.arrive("end")
    coordinator.leave()
    others.wait()
    report(since, before)


def others(ranks: int, port: int) -> None:
    """Write what all ranks but rank 0 would."""
    from torch.distributed import PrefixStore, TCPStore

    from mpiddp.runtime.job.signed_store import SignedStore

    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=600))
    values = SignedStore(PrefixStore("mpiddp/0", store), _SECRET)
    print(flush=True)
    sys.stdin.read()
    for exchange in (1, 2):
        for rank in range(1, ranks):
            values.set(f"exchange/{exchange}/{rank}", json.dumps([exchange - 1, "equal"]))
        for rank in range(1, ranks):
            values.wait([f"exchange/{exchange}/all"], 600)
            values.delete(f"exchange/{exchange}/{rank}")
    for rank in range(1, ranks):
        values.set(f"end/{rank}", "")
        values.set(f"left/3/{rank}", "")


def watch(ranks: int) -> None:
    """The store of rank 0 while all ranks train: one rank of each host asks whether anything has happened."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    askers = _start("askers", max(1, ranks // RANKS_PER_HOST), store.port)
    before = resource.getrusage(resource.RUSAGE_SELF)
    since = time.monotonic()
    _let_begin(askers)
    askers.wait()
    report(since, before)


def askers(hosts: int, port: int) -> None:
    """Ask the store as the ranks that watch for their hosts do, for WATCHED_S seconds.

    One connection carries the requests of all: their number costs, and an idle connection does not.
    """
    from torch.distributed import PrefixStore, TCPStore

    from mpiddp.runtime.job.signed_store import NEWS, SignedStore

    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=600))
    values = SignedStore(PrefixStore("mpiddp/0", store), _SECRET)
    print(flush=True)
    sys.stdin.read()
    start = time.monotonic()
    for turn in range(1, int(WATCHED_S / ASK_EVERY_S) + 1):
        for _ in range(hosts):
            values.get(NEWS)
        time.sleep(max(0.0, start + turn * ASK_EVERY_S - time.monotonic()))


def names(ranks: int) -> None:
    """Resolve the names of all hosts with a name server that answers slowly.

    It runs in namespaces of its own, so that this machine's resolver is left alone. Only root may do so.
    """
    hosts = max(1, ranks // RANKS_PER_HOST)
    inside = [sys.executable, "-m", "benchmarks.ranks.slow_names", str(hosts)]
    subprocess.run(["unshare", "--net", "--mount", *inside], check=True)


def _start(part: str, *arguments: int) -> subprocess.Popen[str]:
    """Start another part as a process, and wait until it has imported everything, which does not count."""
    command = [sys.executable, "-m", __spec__.name, part, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _let_begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def report(since: float, before: resource.struct_rusage | None = None) -> None:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {
        "cpu_s": _cpu_s(own) - (_cpu_s(before) if before else 0.0),
        "clients_cpu_s": _cpu_s(children),
        "wall_s": time.monotonic() - since,
        "peak_mb": own.ru_maxrss / 1024,
    }
    print(json.dumps(cost))


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


PARTS: dict[str, Callable[..., None]] = {
    "launcher": launcher,
    "clients": clients,
    "rank_0": rank_0,
    "others": others,
    "watch": watch,
    "askers": askers,
    "names": names,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*map(int, sys.argv[2:]))
