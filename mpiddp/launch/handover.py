"""The last word with the hosts of an attempt before its mpirun starts, over ssh.

Each connects back to the launcher, which listens already, and to the other hosts: a firewall that passes only
ssh is named in seconds. And each keeps what mpirun would send to its daemons in clear text: the job's key and
the values of -x (`mpiddp.hosts.private`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mpiddp.errors import JobFailed
from mpiddp.hosts import interfaces, network, private, processes
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.remote import ask_hosts, program_that_prints
from mpiddp.launch.command import Request
from mpiddp.launch.control import ControlServer
from mpiddp.protocol import channel
from mpiddp.protocol.variables import ADDRESS
from mpiddp.text import listed, names_by_value

TRAVELLING = (channel, interfaces, network, processes, private)
_PORTS = range(33_000, 60_000)  # the kernel's own choice is among them, as for the ranks
_MOST = 16  # hosts of which each connects to each
_MOST_SAID = 3


def hand_over(
    request: Request, server: ControlServer, name: str, variables: Mapping[str, str]
) -> None:
    """Let each host keep the variables under this name. Raises JobFailed if a host is cut off."""
    hosts, addresses = request.hosts.hosts, request.network.addresses
    port = _PORTS[int.from_bytes(os.urandom(4), "big") % len(_PORTS)]
    knows_all = len(hosts) > 1 and len(addresses) == len(hosts)
    wanted = {
        "launcher": server.settings[ADDRESS],
        "key": server.key,
        "meet": (addresses, port, request.network.start_s, _MOST) if knows_all else (),
        "name": name,
        "variables": variables,
    }
    ask = partial(ask_hosts, python=request.job[0], transport=request.hosts.transport)
    kept: Sequence[Host] = hosts
    try:
        with _answering(server):
            program = program_that_prints(TRAVELLING, f"ready({wanted!a})")
            work_s = 2 * request.network.start_s + 2 * network.CONNECT_S
            found, failures, _ = ask(hosts, program, work_s=work_s)
        kept = [*found]
        if problems := [*failures.values(), *_problems(found, wanted)]:
            raise JobFailed("\n".join(problems))
    except (JobFailed, KeyboardInterrupt):
        ask(kept, program_that_prints(TRAVELLING, f"remove({name!r})"))
        raise


def _problems(found: Mapping[Host, Mapping[str, Any]], wanted: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each way that a firewall, or a missing route, closes to the ranks."""
    address, _, port = wanted["launcher"].rpartition(":")
    cut_off = {host.name: each["launcher"] for host, each in found.items() if each["launcher"]}
    for error, names in names_by_value(cut_off).items():
        fact = f"{listed(names)} → {socket.gethostname()} ({address} tcp/{port}) fails: {error}"
        fix = f"allow TCP from there on {socket.gethostname()}, or name another network: --interface NAME"
        yield f"{fact}. ssh works, so a firewall or a route is in the way. Fix: {fix}"
    met = {host.name: each["hosts"] for host, each in found.items()}
    if cut_off or None in met.values() or not wanted["meet"]:  # None: another program has the port
        return
    addresses, port, *_ = wanted["meet"]
    for fact, fix in [*network.blocked(met, addresses, port)][:_MOST_SAID]:
        yield f"{fact}. Fix: {fix}"


def gone(request: Request, names: Collection[str]) -> list[str]:
    """A sentence for each of these hosts that answers no login any more."""
    hosts = [each for each in request.hosts.hosts if each.name in names]
    _, failures, answers = ask_hosts(hosts, "print(0)", transport=request.hosts.transport)
    lost = {host: each for host, each in failures.items() if not answers[host].has_begun}
    return [f"lost {host.name} before its ranks started: {each}" for host, each in lost.items()]


@contextmanager
def _answering(server: ControlServer) -> Iterator[None]:
    """Let the server answer in a thread, as long as the body lasts."""
    is_over = threading.Event()

    def answer() -> None:
        while not is_over.is_set():
            for data in server.selector.ready(time.monotonic() + 0.02):
                server.receive(data)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
