"""The full part of `mpiddp doctor`: an agent on each host, asked for facts, pairs and speed.

facts, light packages, clocks -> addresses -> all pairs of TCP, each direction -> rates in rounds -> speeds
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.doctor import compare, links, stack
from mpiddp.doctor.hosts import Agents
from mpiddp.doctor.report import UNKNOWN, Line
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.sources import program_with

LINK = "link"  # the figure of all directions of a host
_FACTS_S, _STACK_S, _NETWORK_S, _SPEED_S = 40.0, 70.0, 20.0, 30.0
_MOST_TURNS, _PAUSE_S = 7, 0.5  # while a host seems slow, and the time between them
_OTHERS = 3  # that are measured again beside it
_MOST_AGAIN = 16  # directions that were slow
_PARTS, _END = 4, 20  # of a range of ports that are tried: the beginning of each, and the last few


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


@dataclass(frozen=True)
class Examined:
    """The lines of all checks but the job and the speeds; by a host's name its facts and its figures."""

    lines: list[Line]
    facts: compare.Facts
    figures: compare.Speeds


def examine(agents: Agents, wanted: Wanted) -> Examined:
    """What the hosts say of themselves and of each other."""
    token = secrets.token_hex(8)
    names = [host.name for host in agents.hosts]
    question = {"names": names, "folders": wanted.folders, "files": wanted.files, "token": token}
    answers = agents.ask("facts", {**question, "path": wanted.path}, limit_s=_FACTS_S)
    facts: dict[str, Any] = {host.name: answer for host, answer in answers.items()}
    lines: list[Line] = []
    figures: dict[str, dict[str, float]] = {}
    if facts:
        lines += compare.shells({host.name: text for host, text in agents.greetings.items()})
        lines += compare.names(facts)
        lines += ask_stacks(agents, wanted, stack.LIGHT)
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
            of_pairs, figures = _pairs(agents, facts, wanted)
            lines += of_pairs
        for name, speeds in _speeds(agents, {host: runs.get(host) for host in answers}).items():
            figures[name] = {**figures.get(name, {}), **speeds}
    lines += [Line(question, UNKNOWN, sentence) for question, sentence in agents.refusals]
    return Examined(lines, facts, figures)


def ask_stacks(agents: Agents, wanted: Wanted, packages: tuple[str, ...]) -> list[Line]:
    """Whether the interpreter of the ranks loads the same of these packages on all hosts."""
    print_it = (
        f"import json; print(json.dumps(sys.modules[{stack.__name__!r}].stack({packages!r})))"
    )
    program = program_with((stack,), print_it)
    question = {"python": wanted.python, "env": wanted.env, "program": program}
    found = agents.ask("stack", question, limit_s=_STACK_S)
    named = {host.name: each for host, each in found.items()}
    return compare.stacks(named, wanted.known) if named else []


def _pairs(
    agents: Agents, facts: compare.Facts, wanted: Wanted
) -> tuple[list[Line], dict[str, dict[str, float]]]:
    """All pairs: each direction at once for whether it is open, then in rounds for its rate.

    Returns the lines, and the figures of each host by its name.
    """
    secret = secrets.token_hex(32)
    addresses = {name: _address(name, facts, wanted.networks) for name in facts}
    own = {host: addresses[host.name] for host in agents.hosts if addresses.get(host.name)}
    listening, found = _connected(agents, own, facts, secret, wanted.port)
    lines = [
        *links.mtu(facts, addresses),
        *links.reach(found, addresses, facts),
        *links.ports(found, {host.name: each for host, each in listening.items()}, facts),
    ]
    others = _other_networks(facts, addresses)
    if others:
        by_name = {host.name: host for host in agents.hosts}
        answers = {}
        for network, each in others.items():
            there = {by_name[name]: address for name, address in each.items() if name in by_name}
            answers[network] = _connected(agents, there, facts, secret)[1]
        lines += links.second_networks(answers, set(addresses.values()))
    peers = {host: _peer(host, own[host], each) for host, each in listening.items()}
    rates = _rates(agents, peers, secret, found)
    figures = {
        host.name: {LINK: rate}
        for host in peers
        if (rate := links.of_host(rates, host.name)) is not None
    }
    return [*lines, *links.rates(rates)], figures


def _connected(
    agents: Agents,
    addresses: Mapping[Host, str],
    facts: compare.Facts,
    secret: str,
    port: int | None = None,
) -> tuple[dict[Host, Any], dict[str, Any]]:
    """At which ports each host listens, and what each has found of the others.

    Args:
        port: MASTER_PORT, or 0; then ports of the kernel's range are tried too.
    """
    question: dict[Host, Any] = {
        host: {"address": address, "secret": secret} for host, address in addresses.items()
    }
    if port is not None:
        for host, each in question.items():
            each |= {"port": port, "near": _sample(facts[host.name]["ports"])}
    listening = agents.ask_each("listen", question, limit_s=_NETWORK_S)
    peers = {host: _peer(host, addresses[host], each) for host, each in listening.items()}
    others = {
        host: {"secret": secret, "peers": [peers[other] for other in peers if other != host]}
        for host in peers
    }
    answers = agents.ask_each("reach", others, limit_s=_NETWORK_S + len(addresses))
    return listening, {host.name: answer for host, answer in answers.items()}


def _peer(host: Host, address: str, listening: Mapping[str, Any]) -> dict[str, Any]:
    ports = {"port": listening["port"], "ports": listening["ports"]}
    return {"name": host.name, "address": address, **ports}


def _sample(ports: Sequence[int]) -> list[int]:
    """Ports of all parts of a range of ports: a firewall may open one part."""
    if not ports:
        return []
    first, last = ports
    step = (last - first) // _PARTS
    return [first + number * step for number in range(_PARTS)] + [max(first, last - _END)]


def _other_networks(
    facts: compare.Facts, addresses: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """The networks besides the job's that several hosts share: the address of each host, by its name.

    Each host has its own address there: the bridges of containers have the same on every host.
    """
    found: dict[str, dict[str, str]] = {}
    for name, each in facts.items():
        for one in _interfaces(each):
            if not one.is_loopback and not one.is_virtual and one.address != addresses.get(name):
                found.setdefault(f"{one.network} ({one.name})", {})[name] = one.address
    return {
        network: each
        for network, each in found.items()
        if len(each) > 1 and len({*each.values()}) == len(each)
    }


def _interfaces(found: Mapping[str, Any]) -> list[Interface]:
    """Those of a host, in its facts."""
    return [Interface(one["name"], one["address"], one["network"]) for one in found["interfaces"]]


def _address(name: str, facts: compare.Facts, networks: Sequence[str]) -> str:
    """The host's address on the job's network, else that to which its name leads; "" without any."""
    named = {address for found in facts.values() for address in found["names"].get(name, [])}
    best = sorted(
        (each for each in _interfaces(facts[name]) if not each.is_loopback),
        key=lambda each: (
            not any(each.matches(network) for network in networks),
            each.address not in named,
            each.is_virtual,
        ),
    )
    return best[0].address if best else ""


def _rates(
    agents: Agents, peers: Mapping[Host, Any], secret: str, reached: Mapping[str, Any]
) -> dict[tuple[str, str], links.Pair]:
    """What each direction that is open carries. No host has two connections at a time."""
    rates: dict[tuple[str, str], links.Pair] = {}
    for pairs in links.rounds(list(peers)):
        for one_way in (dict(pairs), {b: a for a, b in pairs}):
            questions = {
                here: {"peer": {**peers[there], "port": answer["port"]}, "secret": secret}
                for here, there in one_way.items()
                if (answer := reached.get(here.name, {}).get(there.name))
                and not answer["error"] + answer["large"]
            }
            answers = agents.ask_each("rate", questions, limit_s=_NETWORK_S)
            rates |= {(here.name, one_way[here].name): each for here, each in answers.items()}
    by_name = {host.name: host for host in peers}
    # Again, alone: another program may have disturbed it.
    for slow in links.slow_pairs(rates)[:_MOST_AGAIN]:
        peer = {**peers[by_name[slow[1]]], "port": reached[slow[0]][slow[1]]["port"]}
        question = {by_name[slow[0]]: {"peer": peer, "secret": secret}}
        for each in agents.ask_each("rate", question, limit_s=_NETWORK_S).values():
            rates[slow] = {
                "rate": max(each["rate"], rates[slow]["rate"]),
                "latency_ms": min(each["latency_ms"], rates[slow]["latency_ms"]),
            }
    return rates


def _speeds(agents: Agents, folders: Mapping[Host, str | None]) -> compare.Speeds:
    """The speeds of all hosts, measured at once.

    As long as one seems slow, it and a few others are measured again in turns, each alone, and the best of
    these turns counts: other programs, or another virtual machine, slow a host down for seconds.
    """
    found = _measured(agents, folders)
    slow = {name for name, _ in compare.slow_hosts(found)}
    others = [host for host in folders if host.name not in slow]
    again = [*others[:_OTHERS], *(host for host in folders if host.name in slow)]
    turns: dict[str, list[dict[str, float]]] = {}
    for _ in range(_MOST_TURNS):
        if not compare.slow_hosts(found):
            break
        time.sleep(_PAUSE_S)
        for host in again:
            for name, speeds in _measured(agents, {host: folders[host]}).items():
                turns.setdefault(name, []).append(speeds)
        found |= {
            name: {what: max(each[what] for each in own if what in each) for what in own[0]}
            for name, own in turns.items()
        }
    return found


def _measured(agents: Agents, folders: Mapping[Host, str | None]) -> dict[str, dict[str, float]]:
    answers = agents.ask_each("speed", folders, limit_s=_SPEED_S)
    return {host.name: speeds for host, speeds in answers.items()}
