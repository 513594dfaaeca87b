"""The full part of `mpiddp doctor`: an agent on each host, asked for facts, pairs and speed.

Agents -> facts, stacks, clocks -> addresses -> all pairs of TCP, each direction -> rates in rounds -> speeds
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from mpiddp.checks import compare
from mpiddp.checks.hosts import Agents
from mpiddp.checks.report import FAIL, UNKNOWN, WARN, Line, or_ok
from mpiddp.hosts.cluster.transfer import Failed
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.launch.starters.command import JobNetwork
from mpiddp.text import shown

_FACTS_S, _STACK_S, _NETWORK_S, _SPEED_S = 60.0, 70.0, 20.0, 30.0
_AGAIN = 2  # measurements of speed after one in which a host was slow


@dataclass(frozen=True)
class Wanted:
    """What the job would use. `folders` by label: working, data, run. `env`: of the interpreter."""

    python: str
    env: Mapping[str, str]
    path: str
    folders: Mapping[str, str]
    files: tuple[str, ...]
    port: int = 0  # MASTER_PORT


def examine(
    agents: Agents, network: JobNetwork, wanted: Wanted, known: Sequence[str]
) -> tuple[list[Line], compare.Facts]:
    """The lines of all checks but the job, and the facts of each host by its name.

    Args:
        known: the packages that the preflight has compared.
    """
    token = secrets.token_hex(8)
    question = {
        "names": [host.name for host in agents.hosts],
        "folders": wanted.folders,
        "files": wanted.files,
        "token": token,
        "path": wanted.path,
    }
    answers = agents.ask("facts", question, limit_s=_FACTS_S)
    lines, found = _without_failures("facts", answers)
    facts = {host.name: answer for host, answer in found.items()}
    if not facts:
        return lines, {}
    names = [host.name for host in found]
    lines += greetings(agents.greetings)
    lines += compare.names(facts, names)
    lines += _stacks(agents, wanted, known)
    lines += compare.gpus(facts)
    if wanted.files:
        lines += compare.files(facts)
    lines += compare.folders(facts, _marks(agents, facts, token))
    lines += compare.clocks({host.name: skew for host, skew in agents.skews.items()})
    if len(facts) > 1:
        addresses = {name: _address(name, facts, network.networks) for name in facts}
        lines += compare.mtu(facts, addresses)
        lines += _pairs(agents, addresses, wanted.port)
    lines += _speeds(agents, facts)
    return lines, facts


def greetings(printed: Mapping[Host, str]) -> list[Line]:
    """Whether the shell of each host starts without output, which other programs over ssh cannot bear."""
    lines = [
        Line(
            "ssh",
            WARN,
            f'the start-up files of the shell on {host.name} print "{shown(text.splitlines()[0])}"',
            "print only in interactive shells: begin ~/.bashrc there with [[ $- == *i* ]] || return",
        )
        for host, text in printed.items()
        if text.strip()
    ]
    return or_ok("ssh", lines, "every host runs python3 from a shell that is not interactive")


def _without_failures(
    check: str, answers: Mapping[Host, Any]
) -> tuple[list[Line], dict[Host, Any]]:
    lines = [
        Line(check, UNKNOWN, f"{host.name}: {answer}")
        for host, answer in answers.items()
        if isinstance(answer, Failed)
    ]
    return lines, {h: answer for h, answer in answers.items() if not isinstance(answer, Failed)}


def _stacks(agents: Agents, wanted: Wanted, known: Sequence[str]) -> list[Line]:
    question = {"python": wanted.python, "env": wanted.env}
    answers = agents.ask("stack", question, limit_s=_STACK_S)
    lines, found = _without_failures("versions", answers)
    return lines + compare.stacks({host.name: stack for host, stack in found.items()}, known)


def _marks(agents: Agents, facts: compare.Facts, token: str) -> dict[str, int]:
    """How many hosts' marks each sees in the folder of runs."""
    found = {
        host: facts[host.name]["folders"]["run"] for host in agents.hosts if host.name in facts
    }
    questions = {
        host: {"path": folder["path"], "token": token}
        for host, folder in found.items()
        if not folder["error"]
    }
    answers = agents.ask_each("marks", questions, limit_s=_NETWORK_S)
    return {host.name: seen for host, seen in _without_failures("", answers)[1].items()}


def _address(name: str, facts: compare.Facts, networks: Sequence[str]) -> str:
    """The host's address on the job's network; without one, that to which its name leads."""
    own = [
        Interface(each["name"], each["address"], each["network"])
        for each in facts[name]["interfaces"]
    ]
    for each in own:
        if any(each.matches(network) for network in networks):
            return each.address
    named = {address for found in facts.values() for address in found["names"].get(name, [])}
    real = [each for each in own if not each.is_loopback]
    best = sorted(real, key=lambda each: (each.address not in named, each.is_virtual))
    return best[0].address if best else "127.0.0.1"


def _pairs(agents: Agents, addresses: Mapping[str, str], port: int) -> list[Line]:
    """All pairs: each direction at once for whether it is open, then in rounds for its rate."""
    secret = secrets.token_hex(32)
    hosts = [host for host in agents.hosts if host.name in addresses]
    ports = [0, *([port] if port else [])]
    lines: list[Line] = []
    for each in ports:
        question = {
            host: {"address": addresses[host.name], "secret": secret, "port": each}
            for host in hosts
            if not ip_address(addresses[host.name]).is_loopback
        }
        answers = agents.ask_each("listen", question, limit_s=_NETWORK_S)
        refused, opened = _without_failures("network", answers)
        lines += refused
        peers = {
            host: {"name": host.name, "address": addresses[host.name], "port": number}
            for host, number in opened.items()
        }
        questions = {
            host: {"secret": secret, "peers": [p for other, p in peers.items() if other != host]}
            for host in peers
        }
        answers = agents.ask_each("reach", questions, limit_s=_NETWORK_S + len(hosts))
        failed, found = _without_failures("network", answers)
        reached = {host.name: answer for host, answer in found.items()}
        lines += failed + compare.reach(reached, addresses)
        if not each:
            lines += compare.rates(_rates(agents, peers, secret, reached))
    return lines


def _rates(
    agents: Agents,
    peers: Mapping[Host, Mapping[str, Any]],
    secret: str,
    reached: Mapping[str, Mapping[str, Any]],
) -> dict[tuple[str, str], float | str]:
    """The bytes a second of each direction that is open. No host has two connections at a time."""
    rates: dict[tuple[str, str], float | str] = {}
    for pairs in rounds(list(peers)):
        for one_way in (pairs, [(b, a) for a, b in pairs]):
            questions = {
                here: {"peer": peers[there], "secret": secret}
                for here, there in one_way
                if not reached.get(here.name, {}).get(there.name, {"error": "-"})["error"]
                and not reached[here.name][there.name]["large"]
            }
            targets = dict(one_way)
            for here, rate in agents.ask_each("rate", questions, limit_s=_NETWORK_S).items():
                known = float(rate) if not isinstance(rate, Failed) else str(rate)
                rates[here.name, targets[here].name] = known
    return rates


def rounds(hosts: Sequence[Host]) -> Iterator[list[tuple[Host, Host]]]:
    """Every pair once, in rounds in which each host is in at most one: one host stays, the others turn."""
    ring: list[Host | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _speeds(agents: Agents, facts: compare.Facts) -> list[Line]:
    """The best of all measurements counts: another program may have disturbed one."""
    folders = {
        host: None if (run := facts[host.name]["folders"]["run"])["error"] else run["path"]
        for host in agents.hosts
        if host.name in facts
    }
    best: dict[str, dict[str, float]] = {}
    lines: list[Line] = []
    asked: list[list[Host]] = [list(folders)]
    for _ in range(1 + _AGAIN):
        for together in asked:
            question = {host: folders[host] for host in together}
            answers = agents.ask_each("speed", question, limit_s=_SPEED_S)
            lines, found = _without_failures("speed", answers)
            for host, speeds in found.items():
                own = best.setdefault(host.name, {})
                own |= {what: max(value, own.get(what, 0.0)) for what, value in speeds.items()}
        slow = {name for name, _ in compare.slow_hosts(best)}
        asked = [[host] for host in folders if host.name in slow]  # again, alone
    return lines + compare.speeds(compare.slow_hosts(best))


def lost(agents: Agents, complaints: Mapping[Host, str]) -> list[Line]:
    """The hosts whose agents did not answer, beside those that the preflight has named."""
    failures = agents.failures.items()
    return [Line("ssh", FAIL, *split(text)) for host, text in failures if host not in complaints]


def split(sentence: str) -> tuple[str, str]:
    """A sentence of the preflight into the fact, and what mends it."""
    fact, _, mend = sentence.partition(". ")
    return fact.rstrip("."), mend.rstrip(".")
