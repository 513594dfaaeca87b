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
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.hosts.processes import OPEN_BESIDES, allow_open
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.launch.plan.options import parse_options
from mpiddp.launch.plan.placement import Past
from mpiddp.launch.plan.preflight import Checked
from mpiddp.launch.run.agents import Launcher
from mpiddp.launch.run.control import Console, SignalQueue
from mpiddp.launch.run.job import Job
from mpiddp.protocol.channel import RANK, Seal, decode, encode, mac, member_key, seals
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.orders import Orders
from mpiddp.protocol.server import PER_RANK, ChannelServer
from mpiddp.protocol.variables import ORDERS
from mpiddp.runtime.rendezvous.channel_process import serve

STEPS = 5  # messages of progress of each rank
RANKS_PER_HOST = 8
_KEY = "a key of the ranks"


def launcher(ranks: int) -> None:
    """Supervise `clients` as if they were an mpirun with so many ranks."""
    from mpiddp.hosts.hostfile import Host, Hosts
    from mpiddp.launch.plan.command import Request
    from mpiddp.launch.plan.starters import STARTERS
    from mpiddp.launch.run.outcome_file import Report

    folder = os.environ["LIGHT_CLIENTS_FOLDER"]
    mpirun = Path(folder, "mpirun")
    mpirun.write_text(
        f"#!/bin/sh\nexec {sys.executable} -m {__spec__.name} clients {ranks}\n", encoding="utf-8"
    )
    mpirun.chmod(0o755)
    per_host = RANKS_PER_HOST if ranks >= RANKS_PER_HOST else 1
    # Addresses of this machine, so that no name server and no login is in the figures.
    names = [f"127.1.{number >> 8}.{number & 255}" for number in range(ranks // per_host)]
    named = Hosts("light clients", tuple(Host(name, ranks=per_host) for name in names))
    request = Request(named, ("true",), ".")
    starter = STARTERS[1]._replace(program=mpirun)
    options = parse_options(["--", "true"])
    plan = Plan(options, starter, Past(named), Checked(), named, request)
    since = time.monotonic()
    with closing(SignalQueue()) as signals:
        outcome = Job(Launcher(signals, Console()), plan, Report("true")).attempt()
    assert outcome.code == 0, outcome
    report(since)


def clients(ranks: int) -> None:
    """Join, agree twice, report some steps and end, for every rank, over connections of their own."""
    orders = Orders.unpacked(os.environ[ORDERS])
    clients = _connect(orders.address, orders.key, ranks)
    for rank, client in enumerate(clients):
        client.send("started", host=f"node{rank // RANKS_PER_HOST}", pid=rank)
        client.send("joining", timeout_s=600)
        client.send("supports_stop")
    _agree(clients)
    for step in range(STEPS):
        for client in clients:
            client.send(
                "progress",
                step=step,
                counter=0,
                own_s=step / 1000,
                cpu_s=step / 1000,
                memory=1 << 30,
            )
    for client in clients:
        client.send("done")
    for client in clients:
        client.connection.close()


def server(ranks: int) -> None:
    """What the process beside rank 0 does for a job without a launcher: the ranks agree twice, and leave."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = str(listener.getsockname()[1])
    command = [sys.executable, "-m", __spec__.name, "members", str(ranks), port]
    members: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    members.stdout.readline()  # it has imported everything, which does not count
    allow_open(2 * PER_RANK * ranks + OPEN_BESIDES)
    before = resource.getrusage(resource.RUSAGE_SELF)
    since = time.monotonic()
    members.stdin.close()
    with TimedSelector() as selector:
        serve(ChannelServer(listener, _KEY, ranks, selector))
    members.wait()
    report(since, before)


def members(ranks: int, port: int) -> None:
    print(flush=True)
    sys.stdin.read()
    clients = _connect(f"127.0.0.1:{port}", _KEY, ranks)
    _agree(clients)
    for client in reversed(clients):  # rank 0 is the last
        client.send("gather", b"null", key="left/1", timeout_s=None)
        client.send("leave")
        client.connection.close()


class _Client(NamedTuple):
    connection: socket.socket
    seal: Seal

    def send(self, kind: str, value: bytes = b"", /, **facts: object) -> None:
        self.connection.sendall(encode(kind, value, self.seal, **facts))


def _connect(address: str, key: str, ranks: int) -> list[_Client]:
    allow_open(ranks + OPEN_BESIDES)
    host, _, port = address.rpartition(":")
    clients = []
    for rank in range(ranks):
        connection = socket.create_connection((host, int(port)))
        facts, _ = decode(connection.recv(4096).rstrip())
        own = member_key(key, RANK, rank)
        proof = mac(own, f"member {facts['challenge']}")
        connection.sendall(encode("hello", rank=rank, challenge="", proof=proof))
        clients.append(_Client(connection, seals(own, facts["challenge"], "").of_member))
    for client in clients:
        client.connection.recv(4096)
    return clients


def _agree(clients: Sequence[_Client]) -> None:
    for number in range(2):
        value = json.dumps([number, "equal"]).encode()
        for client in clients:
            client.send("gather", value, key=f"exchange/{number}", timeout_s=600)
        for client in clients:
            client.connection.recv(4096)


def report(since: float, before: resource.struct_rusage | None = None) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {
        "cpu_s": sum(usage[:2]) - (sum(before[:2]) if before else 0.0),  # user's and system's
        "clients_cpu_s": sum(children[:2]),
        "wall_s": time.monotonic() - since,
        "peak_mb": usage.ru_maxrss / 1024,
    }
    print(json.dumps(cost))


PARTS: dict[str, Callable[..., None]] = {
    "launcher": launcher,
    "clients": clients,
    "server": server,
    "members": members,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*map(int, sys.argv[2:]))
