"""The full part of `mpiddp doctor`: an agent on each host, asked for facts, pairs and speed.

facts, stacks, clocks -> addresses -> all pairs of TCP, each direction -> rates in rounds -> speeds
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.checks import compare, links
from mpiddp.checks.hosts import Agents
from mpiddp.checks.report import UNKNOWN, Line
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface

_FACTS_S, _STACK_S, _NETWORK_S, _SPEED_S = 40.0, 70.0, 20.0, 30.0
_AGAIN = 2  # measurements of a host that was slow
_MOST_AGAIN = 16  # directions that were slow


@dataclass(frozen=True)
class Wanted:
    """What the job would use. `folders` by label: working, run, data. `env`: of the interpreter.

    `known` are packages that were compared already; `networks` the names or networks of interfaces.
    """

    python: str
    env: Mapping[str, str]
    path: str
    folders: Mapping[str, str]
    files: tuple[str, ...]
    port: int  # MASTER_PORT, 0 for any
    known: tuple[str, ...]
    networks: tuple[str, ...]


def examine(agents: Agents, wanted: Wanted) -> tuple[list[Line], compare.Facts]:
    """The lines of all checks but the job, and the facts of each host by its name."""
    token = secrets.token_hex(8)
    names = [host.name for host in agents.hosts]
    question = {"names": names, "folders": wanted.folders, "files": wanted.files, "token": token}
    answers = agents.ask("facts", {**question, "path": wanted.path}, limit_s=_FACTS_S)
    facts: dict[str, Any] = {host.name: answer for host, answer in answers.items()}
    lines: list[Line] = []
    if facts:
        lines += compare.shells({host.name: text for host, text in agents.greetings.items()})
        lines += compare.names(facts)
        question = {"python": wanted.python, "env": wanted.env}
        stacks = agents.ask("stack", question, limit_s=_STACK_S)
        named = {host.name: stack for host, stack in stacks.items()}
        lines += compare.stacks(named, wanted.known) if named else []
        lines += compare.gpus(facts)
        lines += compare.files(facts) if wanted.files else []
        # A host whose folder cannot be used has left no mark, and must see no other's.
        runs = {
            host: found["folders"]["run"]["path"]
            for host, found in answers.items()
            if not found["folders"]["run"]["error"]
        }
        marks = {host: {"path": path, "token": token} for host, path in runs.items()}
        seen = agents.ask_each("marks", marks, limit_s=_NETWORK_S)
        lines += compare.folders(facts, {host.name: count for host, count in seen.items()})
        lines += compare.clocks({host.name: skew for host, skew in agents.skews.items()})
        if len(facts) > 1:
            lines += _pairs(agents, facts, wanted)
        lines += _speeds(agents, {host: runs.get(host) for host in answers})
    lines += [Line(question, UNKNOWN, sentence) for question, sentence in agents.refusals]
    return lines, facts


def _pairs(agents: Agents, facts: compare.Facts, wanted: Wanted) -> list[Line]:
    """All pairs: each direction at once for whether it is open, then in rounds for its rate."""
    secret = secrets.token_hex(32)
    addresses = {name: _address(name, facts, wanted.networks) for name in facts}
    hosts = [host for host in agents.hosts if addresses.get(host.name)]
    lines = links.mtu(facts, addresses)
    for port in {0, wanted.port}:
        question = {
            host: {"address": addresses[host.name], "secret": secret, "port": port}
            for host in hosts
        }
        ports = agents.ask_each("listen", question, limit_s=_NETWORK_S)
        peers = {
            host: {"name": host.name, "address": addresses[host.name], "port": number}
            for host, number in ports.items()
        }
        others = {
            host: {"secret": secret, "peers": [peers[other] for other in peers if other != host]}
            for host in peers
        }
        answers = agents.ask_each("reach", others, limit_s=_NETWORK_S + len(hosts))
        found = {host.name: answer for host, answer in answers.items()}
        lines += links.reach(found, addresses)
        if port == 0:
            lines += links.rates(_rates(agents, peers, secret, found))
    return lines


def _address(name: str, facts: compare.Facts, networks: Sequence[str]) -> str:
    """The host's address on the job's network, else that to which its name leads; "" without any."""
    own = [
        Interface(each["name"], each["address"], each["network"])
        for each in facts[name]["interfaces"]
    ]
    named = {address for found in facts.values() for address in found["names"].get(name, [])}
    best = sorted(
        (each for each in own if not each.is_loopback),
        key=lambda each: (
            not any(each.matches(network) for network in networks),
            each.address not in named,
            each.is_virtual,
        ),
    )
    return best[0].address if best else ""


def _rates(
    agents: Agents, peers: Mapping[Host, Any], secret: str, reached: Mapping[str, Any]
) -> dict[tuple[str, str], float]:
    """The bytes a second of each direction that is open. No host has two connections at a time."""
    rates: dict[tuple[str, str], float] = {}
    for pairs in links.rounds(list(peers)):
        for one_way in (dict(pairs), {b: a for a, b in pairs}):
            questions = {
                here: {"peer": peers[there], "secret": secret}
                for here, there in one_way.items()
                if (answer := reached.get(here.name, {}).get(there.name))
                and not answer["error"] + answer["large"]
            }
            answers = agents.ask_each("rate", questions, limit_s=_NETWORK_S)
            rates |= {(here.name, one_way[here].name): rate for here, rate in answers.items()}
    by_name = {host.name: host for host in peers}
    for slow in list(links.slow_pairs(rates))[
        :_MOST_AGAIN
    ]:  # again, alone: another program may have disturbed it
        question = {by_name[slow[0]]: {"peer": peers[by_name[slow[1]]], "secret": secret}}
        for rate in agents.ask_each("rate", question, limit_s=_NETWORK_S).values():
            rates[slow] = max(rate, rates[slow])
    return rates


def _speeds(agents: Agents, folders: Mapping[Host, str | None]) -> list[Line]:
    """The best of all measurements counts: another program may have disturbed one."""
    best: dict[str, dict[str, float]] = {}
    asked: list[list[Host]] = [list(folders)]
    for _ in range(1 + _AGAIN):
        for together in asked:
            question = {host: folders[host] for host in together}
            answers = agents.ask_each("speed", question, limit_s=_SPEED_S)
            for host, speeds in answers.items():
                own = best.setdefault(host.name, {})
                own |= {what: max(value, own.get(what, 0.0)) for what, value in speeds.items()}
        slow = {name for name, _ in compare.slow_hosts(best)}
        asked = [[host] for host in folders if host.name in slow]  # again, alone
    return compare.speeds(compare.slow_hosts(best))
