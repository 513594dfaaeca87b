"""Work on the hosts of an attempt over ssh: before mpirun starts, and after a failure.

Before the start, each host connects back to the launcher and to the other hosts, so a firewall that passes
only ssh is named in seconds. Each host also keeps the variables of the ranks, with the job's key
(`mpiddp.hosts.private`), because mpirun would send them to its daemons in clear text.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mpiddp.hosts import interfaces, private, processes, reachability
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import Logins, ask_hosts, program_that_prints
from mpiddp.launch import log
from mpiddp.launch.plan.command import Request
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.launch.run.control import ControlServer
from mpiddp.protocol import channel
from mpiddp.protocol.variables import JOB
from mpiddp.text import keys_by_value, listed, with_fix

TRAVELLING = (channel, interfaces, reachability, processes, private)
_MOST = 16  # hosts that all connect to each other; among more hosts, each connects to some
_SWEEP_S = 8.0  # for a login that kills leftover processes


def hand_over(
    plan: Plan, server: ControlServer, name: str, variables: Mapping[str, str], logins: Logins
) -> dict[str, str]:
    """Let each host keep the variables under this name.

    Returns a sentence for each host that is cut off, by the name that mpirun gets. Then no host keeps them.
    `logins` are the preflight's open logins. A host without one gets a new login.
    """
    request, start_s = plan.request, plan.checked.start_s
    hosts, addresses = request.hosts.hosts, request.addresses
    knows_all = len(hosts) > 1 and len(addresses) == len(hosts)
    wanted = {
        "launcher": server.address,
        "key": server.key,
        "name": name,
        "variables": private.packed(variables),
    }
    ask = partial(ask_hosts, python=request.job[0], transport=request.hosts.transport)
    answered, is_kept = [*hosts], False
    try:
        for port in random.sample(reachability.PORTS, reachability.MOST_PORTS):
            wanted["meet"] = (addresses, port, start_s, _MOST) if knows_all else ()
            program = program_that_prints(TRAVELLING, f"ready({wanted!a})")
            with _answering(server):
                answers = ask(
                    hosts, program, work_s=start_s + 4 * reachability.CONNECT_S, logins=logins
                )
            reports = {host: answer.value for host, answer in answers.items() if not answer.why}
            if all(report["hosts"] is not None for report in reports.values()):
                break  # no other program has this port
        answered, silent = (
            [*reports],
            {host: answer for host, answer in answers.items() if answer.why},
        )
        cut_off = {host.name: answer.why for host, answer in silent.items()}
        # The others cannot connect to a host whose program has failed.
        if not any(answer.has_failed_there for answer in silent.values()):
            cut_off |= _cut_off(reports, wanted)
        is_kept = not cut_off
        return cut_off
    finally:
        if not is_kept:
            program = program_that_prints(TRAVELLING, f"remove({name!r})")
            ask(answered, program, work_s=reachability.CONNECT_S, logins=logins)


def _cut_off(
    reports: Mapping[Host, Mapping[str, Any]], wanted: Mapping[str, Any]
) -> dict[str, str]:
    """A sentence for each host that a firewall or a missing route keeps from the others, by its name."""
    address, _, port = wanted["launcher"].rpartition(":")
    here, sentences = socket.gethostname(), dict[str, str]()
    errors = {
        host.name: report["launcher"] for host, report in reports.items() if report["launcher"]
    }
    for error, names in keys_by_value(errors).items():
        fact = f"{listed(names)} → {here} ({address} tcp/{port}) fails: {error}"
        fix = f"allow TCP from there on {here}, or name another network: --interface NAME"
        sentence = with_fix(f"{fact}. ssh works, so a firewall or a route is in the way.", fix)
        sentences |= dict.fromkeys(names, sentence)
    met = {host.name: report["hosts"] for host, report in reports.items()}
    if errors or not wanted["meet"]:
        return sentences
    addresses, port, *_ = wanted["meet"]
    if taken := [name for name, answers in met.items() if answers is None]:
        log.info(
            f"another program has tcp/{port} on {listed(taken)}, so the connections between hosts were not tried."
        )
        return sentences
    for pair, fact, fix in reachability.blocked(met, addresses, port):
        # Blame the other host of the pair: this one runs the launcher and cannot be left out.
        at_fault = next((name for name in pair if name != here), here)
        sentences.setdefault(at_fault, with_fix(f"{fact}.", fix))
    return sentences


def sweep(
    request: Request, hosts: Sequence[Host], job: str, name: str, outputs: Sequence[str]
) -> None:
    """Kill the processes of `job` on these hosts at once, and remove the variables kept under this name.

    A killed daemon or mpirun may leave ranks behind that hang in a collective. The processes of the job have
    its id in their environment, or write to the output of a rank.
    """
    call = f"sweep({f'{JOB}={job}'!r}, {name!r}, {outputs!r})"
    program = program_that_prints(TRAVELLING, call)
    quick = request.hosts.transport._replace(login_s=_SWEEP_S)
    answers = ask_hosts(hosts, program, python=request.job[0], transport=quick)
    for host, answer in answers.items():
        if answer.why:
            log.info(
                f"{host.name} cannot be reached, so no leftover process was killed there; its ranks end by themselves."
            )
        elif answer.value:
            log.info(f"killed leftover processes of the job on {host.name}: {len(answer.value)}.")


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
